"""What a freshly forked process makes of itself: a worker, a spare, a helper, or another program.

Rule 1: a script cannot tell a worker from a first start under torchrun: environment, argv, `__main__`, folder, signals,
        limits, randomness are those of a fresh interpreter (Z2, Z4, Z5).
Rule 2: a spare waits here, warm to the imports; the script begins when it has a rank.
Rule 3: nothing here starts a thread; the first wrapped call does.
"""

import atexit
import contextlib
import importlib
import importlib.util
import json
import os
import pkgutil
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from everstep import environ
from everstep.launcher import console, fresh, imports, reclaim, unflushed
from everstep.process import kernel, mark, stacks
from everstep.process.page import Page
from everstep.recovery import session
from everstep.recovery.core.words import Incarnation
from everstep.recovery.link import Link, LinkClosed
from everstep.recovery.victims import is_victim

_HOPELESS = (SyntaxError, ImportError)
"""What a script raises before it could have trained, and will raise again: told to the agent, never restarted."""


def live(order: Mapping[str, Any], fds: list[int]) -> int:
    """Be what the agent ordered; return the exit code."""
    fds = fresh.high(fds)
    link = Link.from_fd(fds[0])
    try:
        go, _ = link.receive()  # the agent has our pidfd and knows who we are
    except LinkClosed:
        os._exit(1)
    assert go["kind"] == "go", go
    kernel.die_with_parent(int(order["agent"]))
    kernel.name_process(str(order["name"]))
    for number in kernel.ASKING:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environ.replace(fresh.environment(order["environment"] | mark.words(order["job"], order["order"])))
    if order["role"] == "helper":
        return _help(link, order)
    return _work(link, order, go, fds)


def leave(code: int) -> NoReturn:
    """End this process as an interpreter ends, up to and with its exit hooks and open files, and no further.

    Tearing the modules down takes 0.5 s with torch and has hung: a gloo group that the script left alive joins a thread
    that never ends, once its objects are freed in this order (seen with torch 2.13; `multiprocessing` ends its children
    like this too). No thread of C++ is met by a half-dead interpreter either (E8: exit status 134).
    """
    try:
        _wait_for_threads()
        atexit._run_exitfuncs()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]  # and this
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        unflushed.write()
    finally:
        os._exit(code)


def _wait_for_threads() -> None:
    """Do what the interpreter does after the last line of a script; a second time it does nothing."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]  # what Py_Finalize calls


def _help(link: Link, order: Mapping[str, Any]) -> int:
    """Run `module:function(link, **arguments)`; helpers end with the agent."""
    for number in kernel.ASKING:
        signal.signal(number, signal.SIG_IGN)
    _named(order["entry"])(link, **order["arguments"])
    return 0


def _named(dotted: str) -> Callable[..., Any]:
    """Return the function that `module:function` names."""
    module, _, function = dotted.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def _work(link: Link, order: Mapping[str, Any], go: Mapping[str, Any], fds: list[int]) -> int:
    with fresh.low_taken():
        page = Page(fds[1], stacks=True)
    me = session.Session(
        link=link,
        page=page,
        job=order["job"],
        run_dir=Path(order["run_dir"]),
        slot=order["slot"],
        incarnation=Incarnation.parse(go["incarnation"]),
    )
    os.close(fds[1])
    link.send({"kind": "world.hello"})
    while True:
        try:
            begin, _ = link.receive()
        except LinkClosed:
            os._exit(1)
        if begin["kind"] == "world.begin":
            break
        if begin["kind"] == "world.end":  # a spare that was never needed
            return 0
    return _begin(me, begin)


def _begin(me: session.Session, begin: Mapping[str, Any]) -> int:
    """This process has a rank: be what torchrun would have started, and run the script."""
    _redirect(begin["stdout"], begin["stderr"])
    with contextlib.suppress(OSError):  # it has been removed: we stand in it all the same
        os.chdir(begin["cwd"])
    os.umask(begin["umask"])
    if begin["reclaim"]:
        said = reclaim.wait(begin["reclaim"], int(begin["environment"]["LOCAL_RANK"]), begin["environment"], me.job)
        if said:
            me.send({"kind": "world.noticed", "text": said})
    program = _program(me, begin)
    if program:
        return _become(me, program, begin["environment"])
    environ.replace(fresh.environment(begin["environment"]))
    fresh.unfork(begin["threads"])
    return run(me, begin)


def run(me: session.Session, begin: Mapping[str, Any]) -> int:
    """Run the script in this process; return its exit code."""
    fresh.interpreter(_words(begin))
    me.slot = me.telemetry.slot = begin["slot"]
    me.telemetry.rank = begin["rank"]
    me.assigned = begin["assigned"]
    session.install(me)
    if begin["prepare"]:
        me.send({"kind": "world.listens", "signal": stacks.listen(me.page.stacks_fd)})
        _named(begin["prepare"])(me)
    code = _run(me, begin)
    if begin["environment"]["LOCAL_RANK"] == "0":
        script = begin["script"] if begin["module"] else os.path.realpath(begin["script"])
        imports.keep(me.run_dir, script, fresh.modules, fresh.found)
    _wait_for_threads()  # the wrapped call may be on one of them, and is heard until it is over
    me.stop()
    return code


def _program(me: session.Session, begin: Mapping[str, Any]) -> list[str] | None:
    """Return what is exec'd in this process's place: another program, or, for a cold start, a fresh interpreter."""
    if begin["program"] is not None:
        return list(begin["program"])
    if not begin["cold"]:
        return None
    if not begin["prepare"]:
        return [sys.executable, *_words(begin)]
    return [sys.executable, "-u", "-m", "everstep.launcher.cold", *map(str, pack(me, begin))]


def pack(me: session.Session, begin: Mapping[str, Any]) -> list[int]:
    """Return descriptors that the new interpreter inherits: the line, the page, and what it is to be."""
    told = os.memfd_create("everstep-begin", os.MFD_CLOEXEC)
    known = {"job": me.job, "run_dir": str(me.run_dir), "slot": me.slot, "incarnation": str(me.incarnation)}
    with open(told, "w", closefd=False) as file:
        json.dump(known | {"begin": dict(begin)}, file)
    fds = [me.link.fileno(), me.page.stacks_fd, told]
    for fd in fds:
        os.set_inheritable(fd, True)
    return fds


def _words(begin: Mapping[str, Any]) -> list[str]:
    """Return what torchrun would start the interpreter with."""
    module = ["-m"] if begin["module"] else []
    return ["-u", *module, begin["script"], *begin["arguments"]]


def _become(me: session.Session, program: list[str], environment: Mapping[str, str]) -> int:
    """Run another program in this process; returns only when there is none."""
    try:
        os.execvpe(program[0], program, environment)
    except OSError as error:
        text = f"{program[0]} cannot be run: {error.strerror}"
        sys.stderr.write(f"everstep: {text}\n")
        me.send({"kind": "world.script_failed", "text": text, "hopeless": True})
        return 127


def _redirect(stdout: str, stderr: str) -> None:
    """Send the streams into files, appended to; an empty path keeps the console. A full disk never ends training."""
    for path, target in ((stdout, 1), (stderr, 2)):
        if path:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(fd, target)
                os.close(fd)
    console.renew()


def _run(me: session.Session, begin: Mapping[str, Any]) -> int:
    sys.argv = [begin["script"], *begin["arguments"]]
    main = ModuleType("__main__")
    main.__dict__.update({"__builtins__": sys.modules["builtins"], "__annotations__": {}, "__cached__": None})
    sys.modules["__main__"] = main
    if "multiprocessing" in sys.modules:  # sets the alias as it is imported: what spawned children send back bears it
        sys.modules["__mp_main__"] = main
    try:
        _run_main(main, begin["script"], module=begin["module"])
    except SystemExit as end:
        code = _exit_code(end)
        if code and begun_wrapped(me) and not me.called:
            _tell(me, end)  # a parser that refuses an argument would refuse it again
        return code
    except KeyboardInterrupt as error:
        _show(error)
        return 128 + signal.SIGINT
    except BaseException as error:  # noqa: BLE001 - what the interpreter itself does with an uncaught exception
        _show(error)
        _tell(me, error)  # the agent may end us at once: the traceback comes before
        return 1
    return 0


def _run_main(main: ModuleType, script: str, *, module: bool) -> None:
    """Put the folder that the interpreter would into the path, and run what is there."""
    archive = not module and pkgutil.get_importer(script) is not None  # or a folder, with `__main__.py` in it
    if archive or not sys.flags.safe_path:
        place = os.path.abspath(script) if archive else os.path.dirname(os.path.realpath(script))
        sys.path.insert(0, os.getcwd() if module else place)
        fresh.give_way(sys.path[0])
    if archive:
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001 - what runs it
    elif module:
        _find_module(script)
        runpy._run_module_as_main(script)  # type: ignore[attr-defined]  # noqa: SLF001 - what `python -m` runs
    else:
        _run_file(main, script)


def _find_module(name: str) -> None:
    """Raise ImportError for a module that is not there: `runpy` would only exit, as a script that failed may."""
    try:
        if importlib.util.find_spec(name) is not None:
            return
    except (AttributeError, TypeError, ValueError) as error:
        raise ImportError(f"-m {name}: {error}") from None
    raise ImportError(f"-m {name}: there is no module of this name in {os.getcwd()} or on the path")


def _run_file(main: ModuleType, path: str) -> None:
    """Run a script as the interpreter does: in a `__main__` that lives as long as the process."""
    path = os.path.abspath(path)
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _show(error: BaseException) -> None:
    """Print an uncaught exception as the interpreter does, without the frames that stand above a script only here."""
    below = error.__traceback__
    while below is not None and below.tb_frame.f_code.co_filename == __file__:
        below = below.tb_next
    if below is not None or isinstance(error, SyntaxError):
        error.__traceback__ = below
    sys.excepthook(type(error), error, error.__traceback__)


def _exit_code(end: SystemExit) -> int:
    """As the interpreter maps it: None is 0, a number itself, anything else is printed and 1."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    with contextlib.suppress(Exception):  # a user's __str__ may raise anything
        sys.stderr.write(f"{end.code}\n")
    return 1


def _tell(me: session.Session, error: BaseException) -> None:
    """Say what the script died of: one that never came to its wrapped call, or cannot be imported, is not restarted."""
    hopeless = isinstance(error, _HOPELESS) or (begun_wrapped(me) and not me.called)
    text = f"{type(error).__name__}: {_text(error)}"
    if isinstance(error, SystemExit):
        text = f"sys.exit({_text(error)})"
    me.send({"kind": "world.script_failed", "text": text, "hopeless": hopeless, "victim": is_victim(error)})


def begun_wrapped(me: session.Session) -> bool:
    """True when the agent expects this script to come to a wrapped call."""
    return bool(me.assigned and me.assigned.get("wrapped"))


def _text(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        return "(its text cannot be printed)"
