"""Chat templates that never end, swell, or look at files and attributes."""

# ruff: noqa: E501 -- a template is read best in one line

from __future__ import annotations

import os
import time

import pytest

from extract_core.chat import sandbox
from extract_core.chat.sandbox import limited
from extract_core.chat.types import RowProblem
from extract_core.errors import CoresampleError, TemplateError, TemplateOverrunError
from tests.faults.hostile.limits import confined
from tests.unit.chat import kit

MARK = "root:x:0:0"
SHORT = os.environ.get("FAULTS") == "short"

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}" * 4 + "{{ a }}" + "{% endfor %}" * 4,
    "loops without output": "{% for a in range(99999) %}" * 3 + "{% set b = 1 %}" + "{% endfor %}" * 3,
    "mutual macros": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"),
    "list grown in a loop": (
        "{% set n = namespace(x=[]) %}{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% set n.x = n.x + [a, b] %}{% endfor %}{% endfor %}"
    ),
    "generators": "{% for a in range(99999) %}{{ range(99999) | map('string') | select('equalto', '-') | list }}{% endfor %}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
}

LARGE = {
    "repetition": "{{ 'a' * 10**12 }}",
    "repetition of a list": "{{ [1] * 10**12 }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "power of a message": "{{ (messages | length + 7) ** 10 ** 10 }}",
    "products": "{% set n = namespace(x=3) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x % 7 }}",
    "plus": "{% set n = namespace(x='a') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "tilde": "{% set n = namespace(x='a') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "plus of lists": "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "list in list": "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "tuple in tuple": "{% set n = namespace(x=(1,)) %}{% for a in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ n.x }}",
    "dict in dict": "{% set n = namespace(x={}) %}{% for a in range(60) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}{{ n.x }}",
    "dict()": "{% set n = namespace(x={}) %}{% for a in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "varargs": (
        "{% set n = namespace(x=[1]) %}{% macro m() %}{% set n.x = varargs %}{% endmacro %}"
        "{% for a in range(60) %}{{ m(n.x, n.x) }}{% endfor %}{{ n.x | tojson }}"
    ),
    "cycler": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = cycler(n.x, n.x).items %}{% endfor %}"
        "{{ n.x | tojson }}"
    ),
    "namespace": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}"
    ),
    "percent width": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (9999999999, 1) }}",
    "percent many": "{{ ('%(a)s' * 1000000) % {'a': 'b' * 1000000} }}",
    "format width": "{{ '{:9999999999}'.format(1) }}",
    "format nested width": "{{ '{:{}}'.format(1, 9999999999) }}",
    "format_map": "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
    "format many": "{{ ('{0}' * 1000000).format('b' * 1000000) }}",
    "ljust": "{{ 'a'.ljust(9999999999) }}",
    "zfill": "{{ 'a'.zfill(9999999999) }}",
    "center": "{{ 'a'.center(9999999999) }}",
    "expandtabs": "{{ '\t'.expandtabs(999999999) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace of nothing": "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
    "join": "{{ ('b' * 1000000).join('a' * 1000000) }}",
    "join of a range": "{{ ('b' * 10000000).join(range(99999) | map('string')) }}",
    "filter center": "{{ 'a' | center(9999999999) }}",
    "filter center of a constant": "{{ 'a' | center(99999999999) }}",
    "filter indent": "{{ '\n' * 1000000 | indent(9999999999) }}",
    "filter indent of lines": "{{ ('\n' * 1000000) | indent('b' * 1000000) }}",
    "filter replace": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "filter join": "{{ ('a' * 1000000) | join('b' * 1000000) }}",
    "filter join of a generator": "{{ range(99999) | map('string') | join('b' * 10000000) }}",
    "filter format": "{{ '%9999999999s' | format('a') }}",
    "filter batch": "{{ [1] | batch(9999999999, 0) | list }}",
    "filter slice": "{{ [1] | slice(9999999999) | list }}",
    "filter round": "{{ 1.5 | round(9999999999, 'ceil') }}",
    "filter tojson": "{{ [1] | tojson(indent=9999999999) }}",
    "filter sum": "{{ [[1], [2]] | sum(start=[]) }}",
    "filter list": "{{ range(99999) | map('default', 'b' * 10000000) | map('replace', '1', 'b' * 10000000) | list }}",
    "filter wordwrap": "{{ ('a ' * 1000000) | wordwrap(1, wrapstring='b' * 1000000) }}",
    "the output itself": "{% set x = 'b' * 10000000 %}{% for a in range(99999) %}{{ x }}{% endfor %}",
    "a macro's output": (
        "{% macro m(x) %}{% for a in range(99) %}{{ x }}{% endfor %}{% endmacro %}{{ m(m(m(m(m(m('aaaa')))))) }}"
    ),
    "a block's output": "{% set x %}{% for a in range(99999) %}{{ 'b' * 1000000 }}{% endfor %}{% endset %}{{ x }}",
    "range": "{{ range(10**12) | list }}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 5000 + "1" + "]" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "x" + "{% endif %}" * 5000,
    "many operators": "{{ 1" + " + 1" * 50000 + " }}",
}

PRYING = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by item": "{{ ''['__class__'] }}",
    "class by filter": "{{ '' | attr('__class__') }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('cat /etc/passwd').read() }}",
    "globals of a global": "{{ raise_exception.__globals__['json'].codecs.open('/etc/passwd').read() }}",
    "self of strftime_now": "{{ strftime_now.__self__ }}",
    "format string": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as p %}{{ p }}",
    "extends": "{% extends '/etc/passwd' %}",
    "from": "{% from '/etc/passwd' import x %}",
    "self": "{{ self._TemplateReference__context.environment.loader }}",
    "config": "{{ config.items() }}",
    "lipsum": "{{ lipsum.__globals__['os'].environ }}",
    "environment": "{{ self.__init__.__globals__ }}",
    "generator frame": "{{ (messages | map('string')).gi_frame.f_globals }}",
    "changing the row": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'x'}) }}",
}


def _render(template: str) -> str:
    tokenizer = kit.chat_tokenizer(template)
    return tokenizer.render(kit.talk(("user", "Hello"), ("assistant", "Hi")))


@pytest.mark.parametrize("name", list(ENDLESS)[:: 3 if SHORT else 1])
def test_a_template_that_never_ends_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.5)
    kind, text, peak = confined(_render, ENDLESS[name], seconds=60)
    assert kind in ("TemplateOverrunError", "RowProblem"), (kind, text)
    assert peak < 3, f"{peak:.1f} GiB"


@pytest.mark.parametrize("name", list(LARGE)[:: 6 if SHORT else 1])
def test_a_template_cannot_make_what_memory_does_not_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 2.0)
    kind, text, peak = confined(_render, LARGE[name], seconds=60)
    small = kind == "returned" and len(text) < 2_000_000  # harmless after all, as a deep nesting is
    assert small or kind in ("RowProblem", "TemplateError", "TemplateOverrunError"), (kind, text)
    assert peak < 3, f"{peak:.1f} GiB"


@pytest.mark.parametrize("name", PRYING)
def test_a_template_sees_nothing_but_the_row(name: str) -> None:
    try:
        text = _render(PRYING[name])
    except (RowProblem, CoresampleError):
        return
    assert MARK not in text and "/bin" not in text and "<class" not in text and "object at" not in text, text[:500]
    assert "built-in method" not in text and "datetime" not in text, text[:500]


def test_the_row_on_which_a_template_does_not_end_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.3)
    loop = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
    tokenizer = kit.chat_tokenizer("{% if 'TRAP' in messages[0].content %}" + loop + "{% endif %}" + kit.CHATML)
    import json

    from extract_core.chat import read_samples
    from extract_core.settings import ChatSettings, DataSettings

    file = tmp_path / "chats.jsonl"
    rows = [[{"role": "user", "content": text}, {"role": "assistant", "content": "Hi"}] for text in ("a", "TRAP", "b")]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    with pytest.raises(TemplateOverrunError, match=r"chats\.jsonl, row 2: the chat template did not end within"):
        list(
            read_samples(
                DataSettings(path=str(file)), ChatSettings(), tokenizer, max_length=512, vocab_size=tokenizer.vocab_size
            )
        )


def test_nothing_is_raised_after_a_rendering_that_ended_just_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception from outside must not reach the caller's code: many renderings that end around the limit."""
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.05)
    stopped = 0
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        until = time.thread_time() + 0.1

        def compute(until: float = until) -> None:
            while time.thread_time() < until:
                pass

        try:
            limited(compute)
        except TemplateOverrunError:
            stopped += 1
        sum(range(1000))
    assert stopped > 5
    assert not sandbox._active


def test_an_honest_template_keeps_its_rights() -> None:
    template = (
        "{%- set ns = namespace(n=0, seen=[]) -%}{%- macro show(m) -%}<{{ m.role | upper }}>{{ m.content | trim }}"
        "{%- endmacro -%}{%- for m in messages -%}{%- if loop.index0 % 2 == 1 and m.role != 'assistant' -%}{% continue %}"
        "{%- endif -%}{{ show(m) }}{{ '%s-%d' % (m.role, loop.index) }}{{ '{}'.format(m.role) }}"
        "{%- set ns.n = ns.n + 2 * 3 -%}{%- set ns.seen = ns.seen + [m.role] -%}{%- endfor -%}"
        "{{ ns.n ~ '|' ~ ns.seen | join(',') }}{{ {'a': [1, (2, 3)]} | tojson(indent=2) }}{{ 2 ** 10 }}"
        "{{ ['b', 'a'] | sort | map('upper') | list }}{{ 'a-b'.replace('-', '+') | indent(2) }}{{ '-' * 5 }}"
        "{{ messages | map(attribute='role') | unique | join('/') }}{{ strftime_now('%Y') }}"
    )
    from transformers.utils import chat_template_utils as module

    ours = _render(template)
    row = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    import datetime

    theirs = (
        module._cached_compile_jinja_template(template)
        if hasattr(module, "_cached_compile_jinja_template")
        else pytest.fail("transformers compiles its templates elsewhere now")
    ).render(messages=row, strftime_now=datetime.datetime(2025, 1, 1).strftime, add_generation_prompt=False)
    assert ours == theirs
    assert "12|user,assistant" in ours


def test_overrun_is_a_template_error() -> None:
    assert issubclass(TemplateOverrunError, TemplateError) and TemplateOverrunError.exit_code == 2
