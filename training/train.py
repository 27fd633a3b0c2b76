"""Train a bundled model on text that data.py makes up, and write it as a Hugging Face checkpoint.

    python training/train.py --model tiny --minutes 45 --checkpoint build/tiny.pt --out pace/assets/tiny
    python training/train.py --model draft --minutes 8 --teacher pace/assets/tiny --checkpoint build/draft.pt --out
    pace/assets/tiny-draft

The budget is --minutes or --tokens, and the learning rate follows the share of it that is spent. The same command
continues from the checkpoint; with a larger budget it trains further. There are two optimisers: Muon for the matrices
of the layers, AdamW for the embedding and the norms. Batch number i of a seed is always the same text.
"""

import argparse
import itertools
import json
import math
import signal
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from data import documents
from model import SHAPES, Llama
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, Dataset

SHORT_UNTIL = 0.4  # share of the budget that is spent on short rows


class Batches(Dataset):
    """Batch (i, length): ids [B, length + 1] and loss weights [B, length + 1] with B * length = tokens."""

    def __init__(self, tokenizer, seed, tokens):
        self.tokenizer, self.seed, self.tokens = tokenizer, seed, tokens

    def __getitem__(self, index):
        i, length = index
        return self.rows(documents(f"{self.seed}-{i}"), self.tokens // length, length + 1)

    def rows(self, docs, n_rows, length):
        ids, weights = [], []
        for _ in range(n_rows):
            row, row_weights = [], []
            while len(row) < length:
                parts = next(docs)
                for (_, weight), encoded in zip(
                    parts, self.tokenizer.encode_batch([p for p, _ in parts], add_special_tokens=False)
                ):
                    row += encoded.ids
                    row_weights += [weight] * len(encoded.ids)
            ids.append(row[:length])
            weights.append(row_weights[:length])
        return torch.tensor(ids), torch.tensor(weights)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix is replaced by the nearest orthogonal one (five Newton-Schulz steps, Jordan et al. 2024).

    On this data it reaches a given loss in clearly fewer tokens than AdamW, which is what counts on a CPU."""

    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                updates = []
                for p in params:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(momentum, group["momentum"]))
                for p, update in zip(params, orthogonal(torch.stack(updates))):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update.to(p.dtype), alpha=-group["lr"] * max(1, shape[0] / shape[1]) ** 0.5)


def orthogonal(g):
    """[n, rows, cols] -> about U V^T of each, in bf16."""
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


def weighted_loss(logits, ids, weights):
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def distillation_loss(logits, teacher_logits, ids, weights):
    """Half the loss on the true tokens, half on the teacher's distribution: a good draft agrees with its target."""
    kl = F.kl_div(
        logits.float().log_softmax(-1), teacher_logits.float().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    w = weights[:, 1:]
    return 0.5 * weighted_loss(logits, ids, weights) + 0.5 * (kl * w).sum() / w.sum()


def row_length(step, progress):
    """Short rows first: with one or two documents in a row, attention soon finds out what there is to copy. Then long
    ones."""
    if progress < SHORT_UNTIL:
        return 128
    return (128, 512, 128, 512, 128, 512, 128, 1024)[step % 8]


def learning_rate(progress):
    """Share of the peak rate at `progress` in [0, 1]: a short warm-up, then a cosine to almost nothing."""
    return min(1.0, progress / 0.01 + 0.05) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


@torch.no_grad()
def heldout_loss(model, batches, device):
    """Mean loss over all tokens and over answers only, on text of another seed."""
    ids, weights = batches.rows(documents("validation"), 32, 513)
    sums = torch.zeros(4)
    for i, w in zip(ids.split(8), weights.split(8)):
        i, w = i.to(device), w[:, 1:].flatten()
        losses = F.cross_entropy(model(i[:, :-1]).float().flatten(0, 1), i[:, 1:].flatten(), reduction="none").cpu()
        answers = w >= 1
        sums += torch.tensor([losses.sum(), losses.numel(), losses[answers].sum(), answers.sum()])
    return (sums[0] / sums[1]).item(), (sums[2] / sums[3]).item()


def export(model, folder):
    """Write config.json, generation_config.json and model.safetensors (bf16); the tokenizer lies there already."""
    folder = Path(folder)
    (folder / "config.json").write_text(json.dumps(model.config(), indent=2) + "\n")
    (folder / "generation_config.json").write_text(
        json.dumps(dict(bos_token_id=1, eos_token_id=[7, 2], pad_token_id=0, do_sample=False), indent=2) + "\n"
    )
    state = {name: p.detach().cpu().bfloat16().contiguous() for name, p in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def weights_of(folder):
    """What `export` wrote, in float32."""
    return {name: tensor.float() for name, tensor in load_file(Path(folder) / "model.safetensors").items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument(
        "--out", required=True, help="checkpoint folder; build_tokenizer.py has put the tokenizer there"
    )
    parser.add_argument("--checkpoint", type=Path, help="where the state is kept, and read from if it exists")
    parser.add_argument(
        "--init", type=Path, help="start from the weights of this checkpoint folder, such as the bundled one"
    )
    parser.add_argument("--teacher", type=Path, help="checkpoint folder of a tiny model to distil from")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--tokens", type=float)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=0.02, help="peak rate of Muon; AdamW gets a tenth of it")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches; a GPU wants several")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile: about a fifth faster on a CPU, needs a C++ compiler"
    )
    args = parser.parse_args()
    if (args.minutes is None) == (args.tokens is None):
        parser.error("give one of --minutes and --tokens")
    if args.threads:
        torch.set_num_threads(args.threads)

    torch.manual_seed(0)
    device = torch.device(args.device)
    model = Llama(SHAPES[args.model]).to(device)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    optimizers = [
        (Muon(matrices), args.lr),
        (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), args.lr / 10),
    ]
    state = dict(step=0, tokens=0, seconds=0.0)
    if args.init:
        model.load_state_dict(weights_of(args.init))
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        for (optimizer, _), s in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(s)
        state = saved["state"]
    teacher = None
    if args.teacher:
        teacher = Llama(SHAPES["tiny"]).to(device).eval()
        teacher.load_state_dict(weights_of(args.teacher))

    forward = torch.compile(model, dynamic=False) if args.compile else model

    def save():
        export(model, args.out)
        if args.checkpoint:
            args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save(
                dict(model=model.state_dict(), optimizers=[o.state_dict() for o, _ in optimizers], state=state),
                args.checkpoint,
            )

    tokenizer = Tokenizer.from_file(str(Path(args.out) / "tokenizer.json"))
    batches = Batches(tokenizer, args.seed, args.batch_tokens)

    def progress():
        return state["seconds"] / 60 / args.minutes if args.minutes else state["tokens"] / args.tokens

    indices = ((step, row_length(step, progress())) for step in itertools.count(state["step"]))
    loader = iter(DataLoader(batches, batch_size=None, sampler=indices, num_workers=args.workers))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, from step {state['step']}", flush=True)
    stop = threading.Event()  # Ctrl-C and kill end the run after the current step, and save
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    started, earlier, smooth = time.time(), state["seconds"], None
    while True:
        state["seconds"] = earlier + time.time() - started
        if progress() >= 1 or stop.is_set():
            break
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * learning_rate(progress())
        ids, weights = (x.to(device) for x in next(loader))
        with torch.autocast(device.type, torch.bfloat16):
            logits = forward(ids[:, :-1])
            if teacher:
                with torch.no_grad():
                    target = teacher(ids[:, :-1])
        loss = distillation_loss(logits, target, ids, weights) if teacher else weighted_loss(logits, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state["step"] += 1
        state["tokens"] += weights[:, 1:].numel()
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        if state["step"] % 50 == 0:
            print(
                f"step {state['step']}  {state['tokens'] / 1e6:.2f} M tokens  {state['seconds'] / 60:.1f} min  "
                f"{progress():.0%}  loss {smooth:.4f}",
                flush=True,
            )
        if state["step"] % 500 == 0:
            save()
            print("held-out loss: all %.4f, answers %.4f" % heldout_loss(model, batches, device), flush=True)
    save()
    print("held-out loss: all %.4f, answers %.4f" % heldout_loss(model, batches, device), flush=True)


if __name__ == "__main__":
    main()
