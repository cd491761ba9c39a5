"""What a chat template may use: a template comes with a model from anywhere, and is a program.

transformers renders in a sandbox without files, imports and private attributes. It has no bound on time and size:
nested loops never end, and ``"a" * 10**12`` or ``10 ** 10**9`` are one operation that nothing can interrupt. So every
operation that can make a value much larger than what it was given is checked before it is done, and a watcher ends a
rendering that computes too long or takes too much memory.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import BuiltinMethodType, MethodType
from typing import Any, TypeVar

from jinja2 import Environment, Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extract_core.errors import TemplateOverrunError

MOST_CHARACTERS = 64 * 2**20
"""Longest text that a rendering, or any value in it, may have; a list counts its elements and all their texts."""

MOST_SECONDS = 10.0
"""CPU time of one rendering; an honest one takes milliseconds."""

MOST_BYTES = 3 * 2**29
"""Growth of the process's memory during one rendering."""

_MOST_BITS = 4096
_MOST_TEMPLATE = 2**21
_TICK_S = 0.05
_IDLE_TICKS = 40
_WIDTH = re.compile(r"\*|\d{5,}")
_BRACE_WIDTH = re.compile(r"\d{5,}|:[^{}]*\{")
_METHODS = (BuiltinMethodType, MethodType)

T = TypeVar("T")


# -- sizes -----------------------------------------------------------------------------------------------------------


def _refuse(what: str) -> SecurityError:
    return SecurityError(f"{what}; a template may make at most {MOST_CHARACTERS:,} characters")


def _weight(value: Any) -> int:
    """Elements and characters of a value and everything in it, each as often as it is reached."""
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            waiting.extend(item)
        total += 1
        if total + len(waiting) > MOST_CHARACTERS:
            raise _refuse("the value is too large")
    return total


def _sized(value: T) -> T:
    if isinstance(value, list | tuple | dict | set):
        _weight(value)
    return value


def _concat(parts: Iterable[str]) -> str:
    texts = parts if isinstance(parts, list | tuple) else list(parts)
    if sum(map(len, texts)) > MOST_CHARACTERS:
        raise _refuse("the text is too long")
    return "".join(texts)


def _joined(values: Iterable[Any]) -> str:
    """The operator ``~``."""
    return _concat([str(value) for value in values])


def _whole(value: Any, most: int, what: str) -> None:
    if isinstance(value, int) and not -most <= value <= most:
        raise _refuse(f"{what} of {value.bit_length()} bits is too large")


def _check_format(text: Any, values: Any) -> None:
    """``"%9999999999d" % 1``, or a text many times over."""
    if _WIDTH.search(str(text)):
        raise _refuse("a width in a format is too large")
    if len(text) + str(text).count("%") * _weight(values) > MOST_CHARACTERS:
        raise _refuse("the formatted text may be too long")


def _check_replace(text: str, old: str, new: str) -> None:
    if len(new) > len(old) and len(text) + text.count(old) * (len(new) - len(old)) > MOST_CHARACTERS:
        raise _refuse("the text becomes too long")


def _plus(left: Any, right: Any) -> Any:
    if type(left) is str and type(right) is str:  # nearly always
        if len(left) + len(right) > MOST_CHARACTERS:
            raise _refuse("the text is too long")
        return left + right
    if isinstance(left, str) and len(left) + len(right) > MOST_CHARACTERS:
        raise _refuse("the text is too long")
    return _sized(left + right)


def _times(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MOST_BITS:
            raise _refuse("a product is too large")
    else:
        for value, count in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple | bytes) and isinstance(count, int):
                weight = len(value) if isinstance(value, str | bytes) else _weight(value)
                if weight * max(count, 0) > MOST_CHARACTERS:
                    raise _refuse("a repetition is too long")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MOST_BITS:
        raise _refuse("a power is too large")
    return left**right


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _check_format(left, right)
    return left % right


def _check_method(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    """Methods of a text that can make it much longer."""
    if name == "replace" and len(args) >= 2:
        _check_replace(str(owner), str(args[0]), str(args[1]))
    elif name == "join" and args:
        count = len(args[0]) if hasattr(args[0], "__len__") else 0
        if len(owner) * count + _weight(args[0]) > MOST_CHARACTERS:
            raise _refuse("the joined text is too long")
    elif name in ("ljust", "rjust", "center", "zfill") and args:
        _whole(args[0], MOST_CHARACTERS, "a width")
    elif name == "expandtabs" and args:
        _whole(args[0], 1000, "a width")
    elif name == "translate":
        raise _refuse("translate is not for templates")


# -- filters ---------------------------------------------------------------------------------------------------------


def _checked_filters(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The filters of an environment, those that can make values large with a look at their arguments first."""

    def wrapped(name: str, around: Callable[..., Any]) -> Any:
        """``around(filter, value, ...)``; what jinja itself passes first stays out of its sight."""
        function = theirs[name]
        mark = getattr(function, "jinja_pass_arg", None)
        skip = 0 if mark is None else 1

        def checked(*args: Any, **kwargs: Any) -> Any:
            return around(lambda *rest, **more: function(*args[:skip], *rest, **more), *args[skip:], **kwargs)

        if mark is not None:
            checked.jinja_pass_arg = mark  # type: ignore[attr-defined]
        return checked

    def before(name: str, look: Callable[..., None]) -> Any:
        def around(call: Any, *args: Any, **kwargs: Any) -> Any:
            look(*args, **kwargs)
            return call(*args, **kwargs)

        return wrapped(name, around)

    def listed(call: Any, *args: Any, **kwargs: Any) -> Any:
        return _sized(list(_bounded(call(*args, **kwargs))))

    def width(most: int, *names: str) -> Callable[..., None]:
        def look(value: Any, *args: Any, **kwargs: Any) -> None:
            for item in (*args, *(kwargs[name] for name in names if name in kwargs)):
                _whole(item, most, "a width")
                if isinstance(item, str) and len(item) * max(1, len(str(value)) // 8) > MOST_CHARACTERS:
                    raise _refuse("the text becomes too long")

        return look

    def indent(value: Any, width: Any = 4, *args: Any, **kwargs: Any) -> None:
        _whole(width, 1000, "an indentation")
        step = len(width) if isinstance(width, str) else int(width)
        if len(value) + (str(value).count("\n") + 1) * step > MOST_CHARACTERS:
            raise _refuse("the text becomes too long")

    def as_json(value: Any, *args: Any, **kwargs: Any) -> None:
        for item in (*args, *kwargs.values()):
            _whole(item, 100, "an indentation")
            if isinstance(item, str) and len(item) > 100:
                raise _refuse("an indentation is too long")
        _sized(value)

    def replace(value: Any, old: Any, new: Any, *args: Any, **kwargs: Any) -> None:
        _check_replace(str(value), str(old), str(new))

    def join(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        values = value if hasattr(value, "__len__") else list(_bounded(value))
        glue = next((item for item in (*args, kwargs.get("d")) if isinstance(item, str)), "")
        if _weight(values) + len(values) * len(glue) > MOST_CHARACTERS:
            raise _refuse("the joined text is too long")
        return call(values, *args, **kwargs)

    def total(value: Any, attribute: Any = None, start: Any = 0) -> None:
        if not isinstance(start, int | float):
            raise _refuse("only numbers can be summed")

    def short(value: Any, *args: Any, **kwargs: Any) -> None:
        if len(str(value)) > 100_000:
            raise _refuse("the text is too long for this filter")

    def form(value: Any, *args: Any, **kwargs: Any) -> None:
        _check_format(str(value), [args, kwargs])

    def text(value: Any) -> None:
        _sized(value)

    looks: dict[str, Callable[..., None]] = {
        "center": width(MOST_CHARACTERS, "width"),
        "wordwrap": width(MOST_CHARACTERS, "wrapstring"),
        "batch": width(100_000, "linecount"),
        "slice": width(100_000, "slices"),
        "round": width(300, "precision"),
        "indent": indent,
        "tojson": as_json,
        "replace": replace,
        "sum": total,
        "urlize": short,
        "striptags": short,
        "format": form,
        "string": text,
    }
    filters = dict(theirs)
    filters |= {name: before(name, look) for name, look in looks.items() if name in theirs}
    filters |= {name: wrapped(name, listed) for name in ("list", "unique") if name in theirs}
    if "join" in theirs:
        filters["join"] = wrapped("join", join)
    return filters


def _bounded(values: Iterable[Any]) -> Iterable[Any]:
    total = 0
    for value in values:
        total += 1 + (len(value) if isinstance(value, str) else 0)
        if total > MOST_CHARACTERS:
            raise _refuse("the list is too long")
        yield value


# -- the environment -------------------------------------------------------------------------------------------------


class _Generator(CodeGenerator):
    """Has new lists and joined texts pass through the checks."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._wrapped("joined", node.nodes, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.sized(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.sized(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.sized(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._pair("plus", node, frame)

    def visit_Mul(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._pair("times", node, frame)

    def visit_Pow(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._pair("power", node, frame)

    def visit_Mod(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._pair("modulo", node, frame)

    def _pair(self, name: str, node: nodes.BinExpr, frame: Frame) -> None:
        """Without the detour over ``call_binop``, which costs as much again."""
        self.write(f"environment.{name}(")
        self.visit(node.left, frame)
        self.write(", ")
        self.visit(node.right, frame)
        self.write(")")

    def _wrapped(self, name: str, items: list[nodes.Expr], frame: Frame) -> None:
        self.write(f"environment.{name}((")
        for item in items:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """jinja's own sandbox, with a bound on the size of everything that an expression can make."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})  # never computed while a template is compiled
    code_generator_class = _Generator
    concat = staticmethod(_concat)
    joined = staticmethod(_joined)
    sized = staticmethod(_sized)
    plus, times = staticmethod(_plus), staticmethod(_times)
    power, modulo = staticmethod(_power), staticmethod(_modulo)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Functions and methods; see the base class."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, getattr(__obj, "__name__", ""), args)
        elif args or kwargs:
            for value in args:
                _sized(value)
            if kwargs:
                _sized(kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``"{:9999999999}".format(1)``."""
        if type(value) not in _METHODS:
            return None
        format_safely = super().wrap_str_format(value)
        if format_safely is None:
            return None
        text = str(value.__self__)

        def checked(*args: Any, **kwargs: Any) -> str:
            if _BRACE_WIDTH.search(text):
                raise _refuse("a width in a format is too large")
            if len(text) + text.count("{") * _weight([args, kwargs]) > MOST_CHARACTERS:
                raise _refuse("the formatted text may be too long")
            return format_safely(*args, **kwargs)

        return checked


def guard_transformers() -> None:
    """Have transformers compile chat templates for ``GuardedEnvironment``, from now on in this process."""
    from transformers.utils import chat_template_utils as module

    original = module._compile_jinja_template
    if getattr(original, "guarded", False):
        return

    @lru_cache(maxsize=64)
    def compiled(chat_template: str) -> Template | Exception:
        try:
            return build(chat_template)
        except Exception as error:  # noqa: BLE001 -- raised by the caller: a failure is not computed again either
            return error

    def compile_guarded(chat_template: str) -> Template:
        found = compiled(chat_template)
        if isinstance(found, Exception):
            raise found
        return found

    def build(chat_template: str) -> Template:
        if len(chat_template) > _MOST_TEMPLATE:
            raise SecurityError(
                f"the template has {len(chat_template):,} characters, at most {_MOST_TEMPLATE:,} are read"
            )
        theirs: Environment = original("").environment  # their extensions, filters and globals, whatever the release
        ours = GuardedEnvironment(
            trim_blocks=theirs.trim_blocks,
            lstrip_blocks=theirs.lstrip_blocks,
            extensions=[type(extension) for extension in theirs.extensions.values()],
        )
        ours.filters = _checked_filters(theirs.filters)
        ours.tests, ours.policies = dict(theirs.tests), dict(theirs.policies)
        ours.globals.update(theirs.globals)
        ours.globals.pop("lipsum", None)
        return ours.from_string(chat_template)

    compile_guarded.guarded = True  # type: ignore[attr-defined]
    module._compile_jinja_template = compile_guarded


# -- the watcher -----------------------------------------------------------------------------------------------------


class _Overrun(BaseException):
    """Raised inside a rendering from outside; no template and no library takes it for an error of its own."""


class _Rendering:
    """One rendering, as both threads see it. Each flag is set by one thread, once, and in the order that is written."""

    __slots__ = ("clock", "done", "fired", "resident", "settled", "started", "why")

    def __init__(self) -> None:
        self.done = self.fired = self.settled = False
        self.clock: int | None = None
        self.started = 0.0
        self.resident = 0
        self.why = ""


_active: dict[int, _Rendering] = {}
_wake = threading.Event()
_watcher: threading.Thread | None = None


def _forget() -> None:
    global _watcher
    _watcher = None
    _active.clear()
    _wake.clear()


os.register_at_fork(after_in_child=_forget)


def _resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _watch() -> None:
    idle = 0
    while True:
        time.sleep(_TICK_S)
        for thread, rendering in list(_active.items()):
            idle = 0
            _look(thread, rendering)
        idle += 1
        if idle > _IDLE_TICKS:
            _wake.clear()
            if not _active:
                _wake.wait()
            idle = 0


def _look(thread: int, rendering: _Rendering) -> None:
    if rendering.clock is None:
        rendering.clock = time.pthread_getcpuclockid(thread)
        rendering.started, rendering.resident = time.clock_gettime(rendering.clock), _resident()
        return
    if rendering.fired:
        return
    if (seconds := time.clock_gettime(rendering.clock) - rendering.started) > MOST_SECONDS:
        rendering.why = f"did not end within {seconds:.0f} s of computing"
    elif (grown := _resident() - rendering.resident) > MOST_BYTES:
        rendering.why = f"took {grown / 2**30:.1f} GiB of memory"
    else:
        return
    rendering.fired = True
    if not rendering.done:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Overrun))
    rendering.settled = True


def _finish(thread: int, rendering: _Rendering) -> None:
    """From here on nothing is raised in this thread any more."""
    rendering.done = True
    _active.pop(thread, None)
    if rendering.fired:
        while not rendering.settled:
            time.sleep(0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


def limited(render: Callable[[], T]) -> T:
    """What ``render`` gives, if it gives it within ``MOST_SECONDS`` and ``MOST_BYTES``.

    Raises:
        TemplateOverrunError: it did not.
    """
    global _watcher
    thread, rendering = threading.get_ident(), _Rendering()
    if thread in _active:  # inside another one, which is watched
        return render()
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch, name="chat-template-watcher", daemon=True)
        _watcher.start()
    _active[thread] = rendering
    if not _wake.is_set():
        _wake.set()
    try:
        try:
            return render()
        finally:
            _finish(thread, rendering)
    except _Overrun:
        _finish(thread, rendering)
        raise TemplateOverrunError(
            f"the chat template {rendering.why} and was stopped; no honest template needs that. Look at it, or give "
            "another one (chat.template)"
        ) from None
