"""The model's tokenizer with its chat template: loading, rendering, one exact tokenization, and what the template does.

What a template does with a conversation is found out by rendering small probes, never from a table of model names:
where an assistant turn begins and ends, under which name it reads reasoning, whether it takes tool arguments as an
object or as JSON text, whether it accepts null content.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extract_core.chat.conversation import REASONING_FIELDS, RESERVED_KWARGS, refuse_surrogates
from extract_core.chat.jsontext import parse_json
from extract_core.chat.sandbox import guard_transformers, limited
from extract_core.chat.types import Conversation, DropReason, RowProblem
from extract_core.errors import ModelError, TemplateError
from extract_core.settings import ChatSettings, ModelSettings

_USER, _ANSWER, _USER2, _ANSWER2 = "qzuseronezq", "qzanswerqonezq", "qzusertwozq", "qzanswertwozq"
_THOUGHT, _ARGUMENT = "qzthoughtzq", "qzargumentzq"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIDELITY_PROBE = "Hello  world, this is\n\n  a probe: x = 12345; it's 2 o'clock.\tÜber 你好"
_MAX_PROFILES = 256


@dataclass(frozen=True, slots=True)
class TemplateProfile:
    """What a template does, learned from probe renderings.

    Attributes:
        header: text that begins every assistant turn (in ChatML ``<|im_start|>assistant`` and a newline), or empty.
        prompt: what ``add_generation_prompt=True`` appends; empty where the template ignores it.
        user_end: text that ends a user turn, in front of the header.
        ends: texts up to and including the end-of-turn token, longest first; empty where turns have no such token.
        reasoning_field: the message field from which reasoning is rendered, None where it never is.
        null_content: assistant content may stay null beside tool calls.
        arguments_as_text: tool-call arguments must be JSON text.
        tool_calls: calls are rendered; False where the template is known to lose them.
        developer_role: messages with the role developer are rendered; otherwise they are passed as system.
        generation: the template marks generated text by ``{% generation %}``.
        probed: the probes could be rendered at all.
    """

    header: str = ""
    prompt: str = ""
    user_end: str = ""
    ends: tuple[str, ...] = ()
    reasoning_field: str | None = None
    null_content: bool = True
    arguments_as_text: bool = False
    tool_calls: bool = True
    developer_role: bool = True
    generation: bool = False
    probed: bool = False


class ChatTokenizer:
    """A Hugging Face tokenizer and its chat template, with digests and the chosen mask method.

    Attributes:
        hf: the Hugging Face tokenizer.
        template_digest: sha256 (hex) of the chat template, with all variants where it has several.
        tokenizer_digest: sha256 (hex) of vocabulary, merges, normalisation and special tokens.
        vocab_size: tokens known to the tokenizer, added ones included.
        mask_method: ``generation``, ``prefix`` or ``markers``: the one tried first for every row.
        notes: things a user should know, counted per occurrence (what the template left out, and the like).
    """

    def __init__(
        self, hf: Any, chat: ChatSettings | None = None, *, name: str = "tokenizer", digest: str | None = None
    ) -> None:
        """Wrap a loaded tokenizer; ``digest`` is its ``tokenizer_digest`` where that is known.

        Raises:
            TemplateError: there is no template, its syntax is wrong, or ``chat.mask`` needs what it does not have.
        """
        guard_transformers()
        chat = chat or ChatSettings()
        self.hf, self.name, self.notes = hf, name, Counter[str]()
        self._template: str | dict[str, str] | None = (
            _template_file(chat.template) if chat.template is not None else hf.chat_template
        )
        self._kwargs = dict(chat.template_kwargs)
        reserved = sorted(RESERVED_KWARGS & set(self._kwargs))
        if reserved:
            raise TemplateError(f"chat.template_kwargs cannot set {', '.join(reserved)}; remove it")
        self._date = _date(chat.template_date)
        self._profiles: dict[tuple[str, str], TemplateProfile] = {}
        self.vocab_size = len(hf)
        self.has_template = bool(self._template)
        self.template_digest = hashlib.sha256(
            json.dumps(self._template, sort_keys=True, ensure_ascii=False).encode()
            if isinstance(self._template, dict)
            else (self._template or "").encode()
        ).hexdigest()
        self.tokenizer_digest = digest or _tokenizer_digest(hf)
        specials = {str(token) for token in hf.all_special_tokens}
        specials |= {str(token.content) for token in hf.added_tokens_decoder.values() if token.special}
        self.special_tokens = tuple(sorted((s for s in specials if s), key=lambda s: (-len(s), s)))
        if "strftime_now" in self._text_of_all():
            self.notes[f"the template prints today's date; it is given {chat.template_date} (chat.template_date)"] += 1
        self.mask_method = self._choose(chat.mask)
        self.mask_setting = chat.mask

    def template(self, tools: list[dict[str, Any]] | None = None) -> str:
        """The template used for a conversation with these tools (some tokenizers have one of their own for tools).

        Raises:
            TemplateError: the tokenizer has no template.
        """
        if isinstance(self._template, dict):
            name = "tool_use" if tools is not None and "tool_use" in self._template else "default"
            if name in self._template:
                return self._template[name]
            raise TemplateError(
                f"{self.name} has the chat templates {', '.join(sorted(self._template))} and no default one; "
                "give one in a file (chat.template)"
            )
        if not self._template:
            raise TemplateError(
                f"{self.name} has no chat template; give one in a file (chat.template), use the tokenizer of an "
                "instruction-tuned model (model.tokenizer), or bring rows with input_ids"
            )
        return self._template

    def render(
        self, conversation: Conversation, messages: list[dict[str, Any]] | None = None, *, prompt: bool = False
    ) -> str:
        """The text of a conversation (or of other ``messages`` in its place), as the template gives it.

        Raises:
            RowProblem: ``template_failed``, with the template's own message.
        """
        return self._render(
            conversation.messages if messages is None else messages,
            conversation.tools,
            conversation.template_kwargs,
            prompt=prompt,
        )

    def render_generation(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation and the character spans inside ``{% generation %}`` blocks.

        Raises:
            RowProblem: ``template_failed``, with the template's own message.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            template = self.template(conversation.tools)
            texts, spans = limited(
                lambda: render_jinja_template(
                    conversations=[conversation.messages],
                    tools=conversation.tools,
                    chat_template=template,
                    return_assistant_tokens_mask=True,
                    **{**self.hf.special_tokens_map, **self._variables(conversation.template_kwargs)},
                )
            )
        except TemplateError:
            raise
        except Exception as error:
            raise _render_problem(error) from error
        return texts[0], [(int(start), int(end)) for start, end in spans[0]]

    def prepare(self, conversation: Conversation) -> tuple[Conversation, TemplateProfile]:
        """The conversation in the dialect of this template, with the profile that says so.

        Raises:
            RowProblem: ``invalid_utf8``: the arguments of a call, parsed for this template, are not Unicode text.
            TemplateError: the tokenizer has no template.
        """
        profile = self.profile(conversation)
        messages = [self._adapt(message, profile, f"messages[{i}]") for i, message in enumerate(conversation.messages)]
        adapted = Conversation(
            messages, conversation.tools, conversation.template_kwargs, characters=conversation.characters
        )
        return adapted, profile

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Token ids (int32 ``[N]``) of a rendered text and the character at which each token begins (int64 ``[N]``).

        These are the ids of ``apply_chat_template(tokenize=True)``, which tokenizes the rendered text without adding
        special tokens. Characters that a tokenizer trims from its offsets belong to the token that follows them.
        The second value is None for tokenizers without offsets.

        Raises:
            RowProblem: ``tokenizer_failed``, or ``invalid_utf8`` where the text is no Unicode text.
        """
        refuse_surrogates(text, "messages")
        fast = bool(self.hf.is_fast)
        try:
            encoded = self.hf(
                text, add_special_tokens=False, return_offsets_mapping=fast, return_attention_mask=False, verbose=False
            )
        except Exception as error:
            raise RowProblem(DropReason.TOKENIZER_FAILED, f"the tokenizer failed: {_first_line(error)}") from error
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        if not fast:
            return ids, None
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        before = np.concatenate(([0], np.maximum.accumulate(offsets[:, 1])))[: len(ids)]
        return ids, np.minimum(offsets[:, 0], before)

    def template_ids(self, conversation: Conversation) -> np.ndarray:
        """Token ids (int32 ``[N]``) that ``apply_chat_template`` itself gives, for comparison.

        Raises:
            RowProblem: ``template_failed``.
        """
        try:
            template = self.template(conversation.tools)
            ids = limited(
                lambda: self.hf.apply_chat_template(
                    conversation.messages,
                    tools=conversation.tools,
                    chat_template=template,
                    tokenize=True,
                    return_dict=True,
                    **self._variables(conversation.template_kwargs),
                )
            )["input_ids"]
        except TemplateError:
            raise
        except Exception as error:
            raise _render_problem(error) from error
        return np.asarray(ids, dtype=np.int32)

    def profile(self, conversation: Conversation | None = None) -> TemplateProfile:
        """What the template does for conversations with these tools and variables; cached.

        Raises:
            TemplateError: no template, or its syntax is wrong.
        """
        conversation = conversation or Conversation([])
        text = self.template(conversation.tools)
        key = text, json.dumps(conversation.template_kwargs, sort_keys=True, default=repr)
        known = self._profiles.get(key)
        if known is None:
            if len(self._profiles) >= _MAX_PROFILES:
                self._profiles.clear()
            known = self._profiles[key] = self._probe(text, conversation)
        return known

    def _choose(self, wanted: str) -> str:
        if not self.has_template:
            return wanted if wanted != "auto" else "prefix"
        profile = self.profile()
        if wanted == "generation" and not profile.generation:
            raise TemplateError(
                f"chat.mask is 'generation', but the chat template of {self.name} has no {{% generation %}} tags; "
                "use 'auto', 'prefix' or 'markers'"
            )
        if wanted != "auto":
            return wanted
        return "generation" if profile.generation else "prefix" if profile.prompt or not profile.header else "markers"

    def _text_of_all(self) -> str:
        return "\n".join(self._template.values()) if isinstance(self._template, dict) else self._template or ""

    def _variables(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._kwargs, **row, "strftime_now": self._date.strftime}

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
        *,
        prompt: bool,
    ) -> str:
        template = self.template(tools)
        try:
            text: str = limited(
                lambda: self.hf.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=prompt,
                    tokenize=False,
                    **self._variables(kwargs),
                )
            )
        except TemplateError:
            raise
        except Exception as error:
            raise _render_problem(error) from error
        return text

    def _adapt(self, message: dict[str, Any], profile: TemplateProfile, where: str) -> dict[str, Any]:
        message = dict(message)
        if message["role"] == "developer" and not profile.developer_role:
            message["role"] = "system"
            self.notes["messages with the role developer were passed to the template as system"] += 1
        if message["content"] is None and not profile.null_content:
            message["content"] = ""
        if "reasoning_content" in message and profile.reasoning_field not in (None, "reasoning_content"):
            message[str(profile.reasoning_field)] = message.pop("reasoning_content")
        if "tool_calls" in message:
            message["tool_calls"] = [
                _call(call, f"{where}.tool_calls[{i}]", as_text=profile.arguments_as_text)
                for i, call in enumerate(message["tool_calls"])
            ]
        return message

    def _probe(self, template: str, conversation: Conversation) -> TemplateProfile:
        def render(*messages: dict[str, Any], prompt: bool = False) -> str | None:
            try:
                return self._render(list(messages), conversation.tools, conversation.template_kwargs, prompt=prompt)
            except RowProblem as problem:
                if isinstance(problem.__cause__, _syntax_error()):
                    raise TemplateError(
                        f"the chat template of {self.name} is not valid: {problem.detail}; correct the template"
                    ) from problem
                return None

        generation = _GENERATION.search(template) is not None
        user, user2 = {"role": "user", "content": _USER}, {"role": "user", "content": _USER2}
        answer, answer2 = {"role": "assistant", "content": _ANSWER}, {"role": "assistant", "content": _ANSWER2}
        alone, asked, once = render(user), render(user, prompt=True), render(user, answer)
        twice = render(user, answer, user2, answer2)
        facts: dict[str, Any] = {"generation": generation, **self._probe_fields(render)}
        if alone is None or asked is None or once is None:
            return TemplateProfile(**facts)
        user_end = _after(alone, _USER)
        prompt = asked[len(alone) :] if asked.startswith(alone) else _after(asked, _USER)[len(_common(alone, asked)) :]
        headers = [_between(text, _USER, _ANSWER) for text in (once, twice) if text is not None]
        headers = [
            h[len(_common(h, user_end)) :] if not h.startswith(user_end) else h[len(user_end) :] for h in headers
        ]
        header = _common(*headers, prompt) if prompt else _common(*headers)
        tail = _after(once, _ANSWER)
        middle = tail if twice is None else _between(twice, _ANSWER, _USER2)
        return TemplateProfile(
            header=header if header.strip() else "",
            prompt=prompt,
            user_end=user_end,
            ends=self._ends(tail, middle, user_end),
            probed=True,
            **facts,
        )

    def _ends(self, tail: str, middle: str, user_end: str) -> tuple[str, ...]:
        """End-of-turn texts: of a last turn (``tail``), and of an earlier one where that differs (``middle``)."""
        last = self._until_special(tail)
        if last is None:
            text = tail.rstrip()
            last = text if text and middle.startswith(text) else None
        ends = [] if last is None else [last]
        if last is None or not middle.startswith(last):
            inner = self._until_special(middle)
            # The token in front of the next message ends this turn only if it also ends user turns or is the EOS;
            # otherwise it is the next message's own header, as in templates without an end-of-turn token.
            if inner is not None and (
                user_end.lstrip().startswith(inner.lstrip()) or inner.strip() == str(self.hf.eos_token)
            ):
                ends.append(inner)
        return tuple(sorted({end.lstrip() if end.strip() else end for end in ends}, key=len, reverse=True))

    def _until_special(self, text: str) -> str | None:
        found = [(text.find(token), token) for token in self.special_tokens if token in text]
        if not found:
            return None
        at, token = min(found, key=lambda item: (item[0], -len(item[1])))
        return text[: at + len(token)]

    def _probe_fields(self, render: Any) -> dict[str, Any]:
        user = {"role": "user", "content": _USER}
        tool = {"role": "tool", "content": _USER2, "tool_call_id": "call_0"}
        as_object, as_text = (
            [{"type": "function", "id": "call_0", "function": {"name": "qzname", "arguments": arguments}}]
            for arguments in ({"key": _ARGUMENT}, json.dumps({"key": _ARGUMENT}))
        )

        def called(content: str | None, calls: Any, **extra: Any) -> str | None:
            text: str | None = render(
                user, {"role": "assistant", "content": content, "tool_calls": calls, **extra}, tool
            )
            return text

        python_repr = f"{{'key': '{_ARGUMENT}'}}"
        objects = [text for text in (called(None, as_object), called("", as_object)) if text and _ARGUMENT in text]
        texts = [text for text in (called(None, as_text), called("", as_text)) if text and _ARGUMENT in text]
        arguments_as_text = bool(texts) and (not objects or any(python_repr in text for text in objects))
        calls = as_text if arguments_as_text else as_object
        null, empty = called(None, calls), called("", calls)
        # Null stays null where the template takes it; not where it fails, loses the call, or prints the word None.
        null_content = null is not None and (
            empty is None
            or ((_ARGUMENT in null or _ARGUMENT not in empty) and null.count("None") <= empty.count("None"))
        )
        field = None
        for name in REASONING_FIELDS:
            plain = render(user, {"role": "assistant", "content": _ANSWER, name: _THOUGHT})
            with_calls = called(None if null_content else "", calls, **{name: _THOUGHT})
            if any(text is not None and _THOUGHT in text for text in (plain, with_calls)):
                field = name
                break
        developer = render({"role": "developer", "content": _USER2}, user)
        system = render({"role": "system", "content": _USER2}, user)
        lost = (developer is None or _USER2 not in developer) and system is not None and _USER2 in system
        return {
            "reasoning_field": field,
            "null_content": null_content,
            "arguments_as_text": arguments_as_text,
            "tool_calls": (null is None and empty is None) or any("qzname" in text for text in (null, empty) if text),
            "developer_role": not lost,
        }


def load_chat_tokenizer(model: ModelSettings, chat: ChatSettings) -> ChatTokenizer:
    """Load the model's tokenizer and chat template (or the override file ``chat.template``).

    Raises:
        ModelError: the tokenizer cannot be found or loaded.
        TemplateError: see ``ChatTokenizer``.
    """
    where = model.tokenizer or model.path
    named = "model.tokenizer" if model.tokenizer else "model.path"
    if where.startswith(("/", "./", "../", "~")) and not Path(where).expanduser().exists():
        raise ModelError(f"{named}: there is no folder {where}; correct the path")
    options = {"revision": model.revision} if model.revision and not Path(where).is_dir() else {}
    try:
        if Path(where).is_dir() and not model.trust_remote_code:
            loaded = _load_once(where, _state(Path(where)))
        else:
            loaded = _load(where, options, trust_remote_code=model.trust_remote_code)
    except Exception as error:
        raise ModelError(
            f"{named}: the tokenizer of {where} cannot be loaded: {_first_line(error)}; check the path or hub id, and "
            "model.trust_remote_code where the model ships its own tokenizer code"
        ) from error
    tokenizer = ChatTokenizer(loaded.hf, chat, name=where, digest=loaded.digest)
    if loaded.note:
        tokenizer.notes[loaded.note] += 1
    return tokenizer


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A tokenizer as its files give it, with its digest and what a user should know of it."""

    hf: Any
    digest: str
    note: str | None


def _state(folder: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """Changes with any file that a tokenizer is made of: name, size, inode, times of change of bytes and entry."""
    found = [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]
    stats = ((path, path.stat()) for path in sorted(found) if path.is_file())
    return tuple((str(p), s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for p, s in stats)


@lru_cache(maxsize=1)
def _load_once(where: str, _: object) -> _Loaded:
    """A command checks its job before its flow plans it: the same files twice, seconds for a large vocabulary."""
    return _load(where, {}, trust_remote_code=False)


def _load(where: str, options: Mapping[str, Any], *, trust_remote_code: bool) -> _Loaded:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    hf = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **options)
    note = _loses_text(hf, where, options)
    if note:
        hf = PreTrainedTokenizerFast.from_pretrained(where, **options)
    return _Loaded(hf, _tokenizer_digest(hf), note)


def _loses_text(hf: Any, where: str, options: Mapping[str, Any]) -> str | None:
    """Whether the tokenizer class named in the model's files cannot give a text back that its tokenizer.json can.

    Some repositories name a class whose conversion rebuilds the tokenizer with another pre-tokenizer: spaces vanish
    and every token differs from those the model was trained on, without any error.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import cached_file

    if not hf.is_fast or type(hf) is PreTrainedTokenizerFast:
        return None

    file = cached_file(where, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **options)
    if file is None:
        return None
    own = hf.encode(_FIDELITY_PROBE, add_special_tokens=False)
    raw = tokenizers.Tokenizer.from_file(str(file))
    raw_ids = raw.encode(_FIDELITY_PROBE, add_special_tokens=False).ids
    if own == raw_ids:
        return None
    wanted = _FIDELITY_PROBE
    if hf.decode(own, skip_special_tokens=False, clean_up_tokenization_spaces=False).lstrip() == wanted:
        return None
    if raw.decode(raw_ids, skip_special_tokens=False).lstrip() != wanted:
        return None
    return f"the tokenizer class {type(hf).__name__} loses text; tokenizer.json is used as it is"


def _tokenizer_digest(hf: Any) -> str:
    facts: dict[str, Any] = {"special": {k: str(v) for k, v in hf.special_tokens_map.items()}}
    if hf.is_fast:
        facts["backend"] = json.loads(hf.backend_tokenizer.to_str())
        for state in ("truncation", "padding"):
            facts["backend"].pop(state, None)
    else:
        facts["class"], facts["vocab"] = type(hf).__name__, hf.get_vocab()
    return hashlib.sha256(json.dumps(facts, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()


def _template_file(path: str) -> str:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
        raise TemplateError(f"chat.template: the file {path} cannot be read: {reason}") from error
    if not text.strip():
        raise TemplateError(f"chat.template: the file {path} is empty")
    return text


def _date(text: str) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError:
        raise TemplateError(f"chat.template_date: {text!r} is not a date like 2025-01-01") from None


def _call(call: dict[str, Any], where: str, *, as_text: bool) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            parsed = parse_json(arguments)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            refuse_surrogates(parsed, f"{where}.arguments")
            arguments = parsed
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _syntax_error() -> type[Exception]:
    import jinja2

    return jinja2.TemplateSyntaxError


def _render_problem(error: Exception) -> RowProblem:
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if isinstance(line, int) else ""
    return RowProblem(DropReason.TEMPLATE_FAILED, f"the chat template failed{where}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _after(text: str, mark: str) -> str:
    return text.rpartition(mark)[2] if mark in text else ""


def _between(text: str, left: str, right: str) -> str:
    return _after(text.partition(right)[0], left)


def _common(*texts: str) -> str:
    """The longest text with which all of them begin."""
    shared = min(texts, key=len)
    for text in texts:
        while not text.startswith(shared):
            shared = shared[:-1]
    return shared
