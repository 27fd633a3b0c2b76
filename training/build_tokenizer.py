"""The tokenizer of the bundled models: byte-level BPE of 2048 tokens, learned from the training text.

Every byte is a token, so any text can be written. One thing is unusual: the merges are learned on words *without* the
space before them, and the merges "space + token" come last. So a word has the same pieces after a space and after a
quotation mark, except for the space on the first piece. This lets a very small model copy a word it has never seen.
The result is an ordinary tokenizer.json.

    python training/build_tokenizer.py --out pace/assets/tiny
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from data import documents, text
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
CALL = ["<tool_call>", "</tool_call>"]  # visible text, but one token each
VOCAB_SIZE = 2048
SPACED = 620  # number of tokens that also exist with a space before them
PATTERN = r"'s| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # words, single digits, punctuation, white space

TEMPLATE = """\
{{- bos_token -}}
{%- set first = messages[0] if messages and messages[0]['role'] == 'system' else none -%}
{%- if tools -%}
{{- '<|system|>' + (first['content'] if first else 'You are a helpful assistant.') + '\\nTools: ' -}}
{%- for tool in tools -%}
{%- set tool = tool.function if tool.function is defined else tool -%}
{%- set parameters = tool.parameters.properties if tool.parameters is defined and tool.parameters.properties is \
defined else {} -%}
{{- tool.name + '(' + (parameters.keys() | join(', ')) + ')' + ('' if loop.last else '; ') -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- elif first -%}
{{- '<|system|>' + first['content'] + '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role ' + message['role'] + '; the roles are system, user, assistant and tool') -}}
{%- elif message['role'] != 'system' or not loop.first -%}
{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function if call.function is defined else call -%}
{{- '<tool_call>{"name": ' + (call.name | tojson) + ', "arguments": ' -}}
{{- (call.arguments if call.arguments is string else call.arguments | tojson) + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def pieces(n_docs, seed="tokenizer"):
    """Words of the training text with their counts, each with the space before it."""
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    counts = Counter()
    for _, doc in zip(range(n_docs), documents(seed)):
        for part, _ in doc:
            if part not in SPECIAL:
                for special in SPECIAL + CALL:
                    part = part.replace(special, "")
                counts.update(piece for piece, _ in split.pre_tokenize_str(part))
    return counts


def build(n_docs=30_000):
    counts = pieces(n_docs)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - SPACED,
        special_tokens=SPECIAL + CALL,
        show_progress=False,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bare = (p[1:] if p[0] == " " and len(p) > 1 else p for p in sorted(counts))
    tokenizer.train_from_iterator((b for p, b in zip(sorted(counts), bare) for _ in range(counts[p])), trainer)

    first = Counter()
    for piece, count in counts.items():
        if piece[0] == " " and len(piece) > 1:
            first[tokenizer.encode(piece[1:]).tokens[0]] += count
    state = json.loads(tokenizer.to_str())
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    for token in sorted(first, key=lambda t: (-first[t], t)):
        if len(vocab) == VOCAB_SIZE:
            break
        vocab["Ġ" + token] = len(vocab)
        merges.append(["Ġ", token])
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in CALL])
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bos)]
    )
    return tokenizer


def save(tokenizer, folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", nargs="+", required=True)
    args = parser.parse_args()
    tokenizer = build()
    for folder in args.out:
        save(tokenizer, folder)
    n_chars, n_tokens = 0, 0
    for _, doc in zip(range(500), documents("check")):
        n_chars += len(text(doc))
        n_tokens += len(tokenizer.encode(text(doc), add_special_tokens=False).ids)
    print(f"{tokenizer.get_vocab_size()} tokens, {n_chars / n_tokens:.2f} characters a token")
