"""Train a layer for multi-token prediction for a bundled model, and write both as one checkpoint.

    python training/train_head.py --minutes 8 --out build/tiny-mtp

The model itself does not change. The layer reads the model's row of each token, after the final norm, and the
embedding of the next token. It predicts the token after that. It learns from the model's own predictions: a draft is
right if the model would have written it. Each further pass, over the layer's own rows, teaches it a further draft.

`--layers 24` writes the model with further layers that add nothing. Its texts are the same. A step costs as much as in
a model of that depth, so drafts gain as much as there.
"""

import argparse
import itertools
import json
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from model import SHAPES, Layer, Llama, Norm
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from train import Batches, Muon, learning_rate, weights_of

LENGTH = 256
NAMES = {"embedding_norm": "enorm", "row_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
"""Parts of the head, and their names in the checkpoint; those of the block are as in any layer."""


class Head(nn.Module):
    """Embeddings [B, T, H] of tokens and rows [B, T, H] of the tokens before them -> rows [B, T, H]."""

    def __init__(self, model):
        super().__init__()
        shape = model.shape
        self.embedding_norm, self.row_norm, self.norm = Norm(shape), Norm(shape), Norm(shape)
        self.projection = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.block = Layer(shape)
        self.block.load_state_dict(model.model.layers[-1].state_dict())
        self.norm.load_state_dict(model.model.norm.state_dict())
        identity = torch.eye(shape.hidden_size)
        self.projection.weight = nn.Parameter(0.5 * torch.cat([identity, identity], 1))

    def forward(self, embeddings, rows, cos, sin):
        x = self.projection(torch.cat([self.embedding_norm(embeddings), self.row_norm(rows)], -1))
        return self.norm(self.block(x, cos, sin))


def rows_of(model, ids):
    """The model's rows after the final norm."""
    x, t = model.model.embed_tokens(ids), ids.shape[1]
    for layer in model.model.layers:
        x = layer(x, model.cos[:t], model.sin[:t])
    return model.model.norm(x)


def losses(head, model, ids, weights, num_passes):
    """The loss of each pass, and the share of its drafts that the model would have written."""
    embedding = model.model.embed_tokens.weight
    with torch.no_grad():
        true_rows = rows_of(model, ids)
        wanted = F.linear(true_rows, embedding)
    rows, found = true_rows, []
    for number in range(1, num_passes + 1):
        tokens = ids[:, number:]
        t = tokens.shape[1]
        rows = head(model.model.embed_tokens(tokens), rows[:, :t], model.cos[:t], model.sin[:t])
        logits, target, weight = F.linear(rows, embedding), wanted[:, number:], weights[:, number:]
        loss = F.kl_div(
            logits.float().log_softmax(-1), target.float().log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1)
        right = (logits.argmax(-1) == target.argmax(-1)).float()
        found.append(((loss * weight).sum() / weight.sum(), (right * weight).sum() / weight.sum()))
    return found


def export(model, head, base, folder, num_layers):
    """Write the checkpoint: the files of the bundled model, its weights, and those of the head as a further layer."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in Path(base).iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = model.config()
    own = config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}, indent=2) + "\n")
    state = model.state_dict()
    for index in range(own, num_layers):
        for name, tensor in model.model.layers[-1].state_dict().items():
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            state[f"model.layers.{index}.{name}"] = torch.zeros_like(tensor) if adds else tensor
    for name, tensor in head.state_dict().items():
        part, _, rest = name.partition(".")
        state[f"model.layers.{num_layers}.{NAMES[part] + '.' if part in NAMES else ''}{rest}"] = tensor
    state = {name: tensor.detach().bfloat16().contiguous() for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("pace/assets/tiny"), help="folder of the bundled model")
    parser.add_argument("--out", required=True, help="folder of the checkpoint to write")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--passes", type=int, default=2, help="further drafts that it learns, the first included")
    parser.add_argument("--layers", type=int, default=0, help="layers of the written model; further ones add nothing")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=0.02, help="peak rate of Muon; AdamW gets a tenth of it")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = Llama(SHAPES["tiny"]).requires_grad_(False).eval()
    model.load_state_dict(weights_of(args.base))
    head = Head(model)
    matrices = [p for p in head.parameters() if p.ndim == 2]
    optimizers = [
        (Muon(matrices), args.lr),
        (torch.optim.AdamW([p for p in head.parameters() if p.ndim == 1], weight_decay=0.0), args.lr / 10),
    ]
    batches = Batches(Tokenizer.from_file(str(args.base / "tokenizer.json")), "head", args.batch_tokens)
    started, num_layers = time.time(), max(args.layers, model.shape.num_hidden_layers)
    for step in itertools.count():
        progress = (time.time() - started) / 60 / args.minutes
        if progress >= 1:
            break
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * learning_rate(progress)
        ids, weights = batches[step, LENGTH]
        found = losses(head, model, ids, weights, args.passes)
        sum(loss for loss, _ in found).backward()
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            shares = ", ".join(f"{share:.3f}" for _, share in found)
            print(f"step {step}  {progress:.0%}  loss {found[0][0]:.4f}  right {shares}", flush=True)
        if step % 200 == 199:
            export(model, head, args.base, args.out, num_layers)
    export(model, head, args.base, args.out, num_layers)


if __name__ == "__main__":
    main()
