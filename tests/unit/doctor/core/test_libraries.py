"""What torch, its devices and the zygote's trial come to."""

import pytest

from everstep.doctor.core.libraries import Torch, torch, zygote

H200 = ("NVIDIA H200",) * 8
GPU = {"version": "2.11.0+cu128", "cuda": "12.8", "nccl": "2.28.9", "devices": H200}


def levels(facts, ranks=8, trouble="", driver="580.95.05"):
    return {one.what: one.level.value for one in torch(Torch.from_facts(facts, trouble, driver), ranks)}


def test_a_node_as_it_was_measured_is_ok():
    assert levels(GPU) == {"torch": "ok", "devices": "ok", "nccl": "ok"}


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.7.1", "problem"), ("2.8.0", "ok"), ("2.13.0+cpu", "ok"), ("2.14.0a0+git1", "warning"), ("3.0", "warning")],
)
def test_versions_of_torch(version, level):
    assert levels({"version": version}, driver="") == {"torch": level, "devices": "ok"}


@pytest.mark.parametrize(
    ("changes", "what", "level"),
    [
        ({"cuda": "", "devices": ()}, "devices", "problem"),  # it would train on the host, unasked
        ({"devices": (), "device_trouble": "the driver is too old"}, "devices", "problem"),
        ({"devices": ()}, "devices", "problem"),
        ({"devices": H200[:4]}, "devices", "warning"),
        ({"nccl": ""}, "nccl", "problem"),
        ({"nccl": "2.19.3"}, "nccl", "warning"),
        ({"nccl": "2.28.3"}, "nccl", "ok"),
    ],
)
def test_devices_and_what_they_speak(changes, what, level):
    assert levels(GPU | changes)[what] == level


@pytest.mark.parametrize("trouble", ["no answer within 120 s, in: importing torch", ""])
def test_a_torch_that_hangs_or_does_not_import_is_a_problem(trouble):
    facts = {} if trouble else {"trouble": "cannot be imported: ImportError('libcudart')"}
    (one,) = torch(Torch.from_facts(facts, trouble, "580.95.05"), 1)
    assert one.level.value == "problem"
    assert one.seen == (trouble or facts["trouble"])


def test_the_zygote_s_own_words_are_the_finding():
    assert [one.level.value for one in zygote("", [])] == ["ok"]
    assert [one.level.value for one in zygote("", ["it has threads beside its own"])] == ["ok", "warning"]
    (one,) = zygote("imports failed: ImportError('x')", ["a word before"])
    assert (one.level.value, one.seen) == ("problem", "imports failed: ImportError('x')")
