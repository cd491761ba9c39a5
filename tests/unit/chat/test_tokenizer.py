"""Loading a tokenizer with its template: digests, the dialect of a template, and what cannot be used."""

from __future__ import annotations

import json

import pytest

from extract_core.chat import Conversation, load_chat_tokenizer, mask_conversation
from extract_core.errors import ModelError, TemplateError
from extract_core.settings import ChatSettings, ModelSettings
from tests.unit.chat import kit
from tests.unit.chat.kit import GOOD, chat_tokenizer, hf_tokenizer, read, runs, talk, write_jsonl


def _saved(tmp_path, template=kit.CHATML) -> str:
    hf_tokenizer(template).save_pretrained(str(tmp_path / "model"))
    return str(tmp_path / "model")


def test_load_from_a_folder_and_digests(tmp_path) -> None:
    where = _saved(tmp_path)
    loaded = load_chat_tokenizer(ModelSettings(path=where), ChatSettings())
    assert loaded.vocab_size == len(hf_tokenizer())
    assert loaded.mask_method == "prefix"
    assert loaded.template_digest == chat_tokenizer().template_digest
    assert loaded.tokenizer_digest == load_chat_tokenizer(ModelSettings(path=where), ChatSettings()).tokenizer_digest
    other = hf_tokenizer()
    other.add_tokens(["qq"])
    from extract_core.chat import ChatTokenizer

    assert ChatTokenizer(other).tokenizer_digest != chat_tokenizer().tokenizer_digest
    assert chat_tokenizer(kit.THINKING).template_digest != loaded.template_digest


def test_a_process_loads_a_tokenizer_once_as_long_as_its_files_stay(tmp_path) -> None:
    where = _saved(tmp_path)
    first = load_chat_tokenizer(ModelSettings(path=where), ChatSettings())
    again = load_chat_tokenizer(ModelSettings(path=where), ChatSettings(template_date="2024-01-01"))
    assert again.hf is first.hf
    assert again.notes is not first.notes
    other = hf_tokenizer(kit.THINKING)
    other.add_tokens(["qq"])
    other.save_pretrained(where)
    changed = load_chat_tokenizer(ModelSettings(path=where), ChatSettings())
    assert changed.vocab_size == first.vocab_size + 1
    assert changed.tokenizer_digest != first.tokenizer_digest
    assert changed.template_digest != first.template_digest


def test_tokenizer_of_its_own(tmp_path) -> None:
    where = _saved(tmp_path)
    model = ModelSettings(path=str(tmp_path / "weights-only"), tokenizer=where)
    assert load_chat_tokenizer(model, ChatSettings()).name == where


def test_template_from_a_file(tmp_path) -> None:
    where, file = _saved(tmp_path, None), tmp_path / "mine.jinja"
    file.write_text(kit.CHATML_GENERATION)
    loaded = load_chat_tokenizer(ModelSettings(path=where), ChatSettings(template=str(file)))
    assert loaded.mask_method == "generation"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read: No such file"),
        ("  \n", "is empty"),
        ("{% if %}", "is not valid"),
        ("{{ a", "is not valid"),
    ],
)
def test_template_file_that_cannot_be_used(tmp_path, content, text) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(TemplateError, match=text):
        load_chat_tokenizer(ModelSettings(path=_saved(tmp_path)), ChatSettings(template=str(file)))


def test_no_template_is_an_error_only_where_one_is_needed(tmp_path) -> None:
    loaded = load_chat_tokenizer(ModelSettings(path=_saved(tmp_path, None)), ChatSettings())
    assert len(read(write_jsonl(tmp_path / "a.jsonl", {"input_ids": [5, 6]}), loaded)) == 1
    with pytest.raises(TemplateError, match=r"has no chat template; give one in a file .chat\.template.") as caught:
        read(write_jsonl(tmp_path / "b.jsonl", GOOD), loaded)
    assert loaded.name in str(caught.value)


def test_several_templates(tmp_path) -> None:
    tokenizer = chat_tokenizer({"default": kit.CHATML, "tool_use": kit.TOOLS})
    with_tools = talk(("user", "a"), ("assistant", "b"), tools=[{"type": "function", "function": {"name": "f"}}])
    assert "tools\n" in mask_conversation(tokenizer, with_tools).text
    assert "tools\n" not in mask_conversation(tokenizer, talk(("user", "a"), ("assistant", "b"))).text
    with pytest.raises(TemplateError, match="has the chat templates rag and no default one"):
        chat_tokenizer({"rag": kit.CHATML})


@pytest.mark.parametrize("path", ["/no/such/folder", "./no-such-folder"])
def test_model_folder_that_is_not_there(path) -> None:
    with pytest.raises(ModelError, match=r"model.path: there is no folder"):
        load_chat_tokenizer(ModelSettings(path=path), ChatSettings())


def test_folder_without_a_tokenizer(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"model.tokenizer: the tokenizer of .* cannot be loaded"):
        load_chat_tokenizer(ModelSettings(path="x", tokenizer=str(tmp_path)), ChatSettings())


def test_generation_mask_needs_generation_tags() -> None:
    with pytest.raises(TemplateError, match=r"chat\.mask is 'generation', but the chat template of tiny has no"):
        chat_tokenizer(kit.CHATML, mask="generation")


def test_reserved_template_variables() -> None:
    with pytest.raises(TemplateError, match="cannot set tokenize"):
        chat_tokenizer(template_kwargs={"tokenize": False})


def test_todays_date_is_a_fixed_date() -> None:
    template = "{{ strftime_now('%d %b %Y') }}\n" + kit.CHATML
    tokenizer = chat_tokenizer(template, template_date="2024-07-26")
    assert mask_conversation(tokenizer, talk(("user", "a"), ("assistant", "b"))).text.startswith("26 Jul 2024")
    assert any("2024-07-26" in note for note in tokenizer.notes)
    with pytest.raises(TemplateError, match="'2024-13-01' is not a date"):
        chat_tokenizer(template, template_date="2024-13-01")


def test_template_variables_of_job_and_row() -> None:
    template = kit.CHATML + "{{ mood }}"
    tokenizer = chat_tokenizer(template, template_kwargs={"mood": "calm"})
    assert tokenizer.render(talk(("user", "a"))).endswith("calm")
    assert tokenizer.render(
        Conversation([{"role": "user", "content": "a"}], template_kwargs={"mood": "wild"})
    ).endswith("wild")


def _call(arguments) -> Conversation:
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": arguments}}
    return Conversation(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    )


TEXT_ARGUMENTS = kit.TOOLS.replace("(c.function.arguments | tojson)", "c.function.arguments").replace(
    "+ m.content }", "+ (m.content or '') }"
)


@pytest.mark.parametrize("template", [kit.TOOLS, TEXT_ARGUMENTS])
@pytest.mark.parametrize("arguments", [{"x": "é"}, json.dumps({"x": "é"}, ensure_ascii=False)])
def test_tool_arguments_come_in_the_form_the_template_takes(template, arguments) -> None:
    """One template writes arguments as JSON itself, the other needs text; the same call gives the same text in both."""
    assert '<call>f{"x": "é"}</call>' in mask_conversation(chat_tokenizer(template), _call(arguments)).text


def test_null_content_is_not_printed_as_none() -> None:
    template = kit.TOOLS.replace("m.content }", "(m.content | trim) }")
    assert not chat_tokenizer(template).profile().null_content
    text = mask_conversation(chat_tokenizer(template), _call({})).text
    assert "None" not in text
    assert chat_tokenizer(TEXT_ARGUMENTS).profile().null_content


def test_developer_role_becomes_system_where_the_template_would_lose_it() -> None:
    template = "{% for m in messages if m.role in ('system', 'user', 'assistant') %}" + kit.CHATML.removeprefix(
        "{% for m in messages %}"
    )
    tokenizer = chat_tokenizer(template)
    masked = mask_conversation(tokenizer, talk(("developer", "be brief"), ("user", "a"), ("assistant", "b")))
    assert masked.text.startswith("<|im_start|>system\nbe brief")
    assert any("developer" in note for note in tokenizer.notes)
    assert runs(tokenizer, masked.token_ids, masked.loss_mask) == ["b<|im_end|>"]
    kept = mask_conversation(chat_tokenizer(), talk(("developer", "be brief"), ("user", "a"), ("assistant", "b")))
    assert kept.text.startswith("<|im_start|>developer")


def test_text_left_out_by_the_template_is_counted() -> None:
    template = "{% for m in messages if m.role != 'system' %}" + kit.CHATML.removeprefix("{% for m in messages %}")
    tokenizer = chat_tokenizer(template)
    mask_conversation(tokenizer, talk(("system", "rules"), ("user", "a"), ("assistant", "b")))
    assert tokenizer.notes == {"the text of a system message was left out or changed by the chat template": 1}
