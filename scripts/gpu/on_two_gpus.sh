#!/usr/bin/env bash
# Everstep on two GPUs over NCCL: the demo's proof, then larger models through faults. Results go to $OUT.
# usage: scripts/gpu/on_two_gpus.sh        (wheels that the machine lacks lie in .wheels/)
set -u
out=${OUT:-/tmp}
python3 -m pip install -q --no-index --no-deps .wheels/*.whl 2>&1 | tail -2
export PYTHONPATH=src NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 TORCH_CPP_LOG_LEVEL=error
run() { python3 -m everstep.cli run --nproc-per-node 2 "$@"; }
show() { python3 scripts/gpu/recoveries.py "$1"; }
for types in exception hang sigkill; do
  name=tiny-${types//,/-}
  timeout 150 env python3 -m everstep.cli run --nproc-per-node 2 --run-dir "$out/runs/$name" --fault-count 5 --fault-seed 42 --fault-types $types \
    examples/train_llama.py --steps 150 --record "$out/$name.jsonl" > "$out/$name.log" 2>&1
  echo "$name rc $?"; show "$out/runs/$name"; tail -2 "$out/$name.log"
done
for kind in twin ddp-twin; do
  flags=""; [ $kind = ddp-twin ] && flags="--parallel ddp"
  timeout 100 env python3 -m everstep.cli run --nproc-per-node 2 --run-dir "$out/runs/$kind" examples/train_llama.py $flags --steps 150 --record "$out/$kind.jsonl" > "$out/$kind.log" 2>&1
  echo "$kind rc $?"
done
timeout 100 env python3 -m everstep.cli run --nproc-per-node 2 --run-dir "$out/runs/ddp" --fault-count 4 --fault-seed 3 --fault-types exception,sigkill \
  examples/train_llama.py --parallel ddp --steps 150 --record "$out/ddp.jsonl" > "$out/ddp.log" 2>&1
echo "ddp rc $?"; show "$out/runs/ddp"
python3 scripts/gpu/recoveries.py --compare "$out/ddp-twin.jsonl" "$out/ddp.jsonl"
python3 scripts/gpu/recoveries.py --compare "$out/twin.jsonl" "$out"/tiny-*.jsonl
mkdir -p /tmp/llama-300m && cat > /tmp/llama-300m/config.json <<'JSON'
{"model_type": "llama", "vocab_size": 256, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 18,
 "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": false}
JSON
free -g | head -2
timeout 170 env python3 -m everstep.cli run --nproc-per-node 2 --run-dir "$out/runs/300m" --fault-count 3 --fault-seed 7 --fault-types exception,sigkill,hang --checkpoint-dir /tmp/ck --checkpoint-interval 20 \
  examples/train_llama.py --model /tmp/llama-300m --seq 1024 --batch 4 --steps 80 > "$out/300m.log" 2>&1
echo "300m rc $?"; show "$out/runs/300m"; tail -3 "$out/300m.log"; ls /tmp/ck
grep -h "zygote has threads" "$out"/*.log | sort | uniq -c
mkdir -p "$out/keep" && tar czf "$out/keep/runs.tgz" -C "$out" --exclude "*.distcp" runs 2>/dev/null; mv "$out"/*.log "$out"/*.jsonl /tmp/ 2>/dev/null; cp /tmp/300m.log /tmp/tiny-hang.log /tmp/ddp.log "$out"; rm -rf "$out/runs"
