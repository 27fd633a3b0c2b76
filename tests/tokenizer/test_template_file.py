"""Templates in `chat_template.json`."""

from __future__ import annotations

import json

import pytest

from pace.tokenizer.template_file import read_template_file

NAMED = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}


def test_what_it_may_hold(tmp_path):
    assert read_template_file(tmp_path) is None
    listed = [{"name": name, "template": template} for name, template in NAMED.items()]
    for written, read in (("{{ messages }}", "{{ messages }}"), (NAMED, NAMED), (listed, NAMED)):
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": written}))
        assert read_template_file(tmp_path) == read


@pytest.mark.parametrize("content", ['{"chat_template": 5}', '{"chat_template": []}', '{"chat_template": {"a": 1}}',
"{}", "[]",
                                     '{"chat_template": [{"name": "a"}]}', "{"])  # fmt: skip
def test_what_it_may_not_hold(tmp_path, content):
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(ValueError, match="chat_template.json"):
        read_template_file(tmp_path)
