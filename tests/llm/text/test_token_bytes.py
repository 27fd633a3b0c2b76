"""Tables of tokens' bytes: one for each tokenizer, which they do not outlive."""

from __future__ import annotations

import copy
import gc
import weakref

from pace.assets import TINY
from pace.llm.text.token_bytes import TokenBytes
from pace.tokenizer.loading import load_tokenizer


def test_a_table_is_freed_with_its_tokenizer():
    tokenizer = load_tokenizer(TINY)
    table = TokenBytes.of(tokenizer)
    assert TokenBytes.of(tokenizer) is table and table.text(tokenizer.eos_token_id) == tokenizer.eos_token
    copied = copy.deepcopy(tokenizer)
    assert TokenBytes.of(copied) is not table and TokenBytes.of(copied) is TokenBytes.of(copied)
    held = [weakref.ref(one) for one in (tokenizer, copied, table)]
    del tokenizer, copied, table
    gc.collect()
    assert [reference() for reference in held] == [None] * 3
