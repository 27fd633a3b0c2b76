"""Writes a checkpoint as an ONNX file, with transformers, torch and the tools of ONNX Runtime."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

MAX_PROTOBUF = 2**31
"""Bytes of a file; larger models have their weights in a second one."""


def ensure_onnx(checkpoint: Path, variant: str) -> Path:
    """Returns the ONNX file of a checkpoint, from (input_ids, attention_mask) to rows of all tokens, and writes it the
    first time. `variant`: "fp32", or "int8" for ONNX Runtime's dynamic quantisation of it."""
    folder = checkpoint.parent / f"onnx-{variant}"
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if variant == "fp32":
            _export(checkpoint, partial / "model.onnx")
        else:
            _quantize(ensure_onnx(checkpoint, "fp32"), partial / "model.onnx")
        partial.rename(folder)
    return folder / "model.onnx"


def _export(checkpoint: Path, target: Path) -> None:
    import torch
    from transformers import AutoModel

    config = json.loads((checkpoint / "config.json").read_text())
    causal = config["model_type"] != "bert"
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()

    class Rows(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            keep = attention_mask[:, None, None, :].to(torch.float32)
            if causal:
                places = torch.arange(input_ids.shape[1])
                keep = keep * (places[None, :] <= places[:, None]).to(torch.float32)
            mask = (1.0 - keep) * torch.finfo(torch.float32).min
            more = {"use_cache": False} if causal else {}
            return self.model(input_ids=input_ids, attention_mask=mask, return_dict=True, **more).last_hidden_state

    rows = Rows()
    rows.model = model
    tokens, mask = torch.randint(5, 100, (2, 16)), torch.ones(2, 16, dtype=torch.int64)
    mask[1, 9:] = 0
    names = ["input_ids", "attention_mask"]
    axes = {name: {0: "batch", 1: "tokens"} for name in [*names, "rows"]}
    with torch.no_grad():
        torch.onnx.export(
            rows, (tokens, mask), str(target), input_names=names, output_names=["rows"], dynamic_axes=axes,
            opset_version=17, do_constant_folding=True, dynamo=False,
        )  # fmt: skip
    if not causal:
        _fuse(target, config)


def _fuse(path: Path, config: dict) -> None:
    """Fuses attention, norms and activations of a BERT, as the files that fastembed downloads have them."""
    from onnxruntime.transformers.optimizer import optimize_model

    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    optimised = optimize_model(str(path), "bert", num_heads=heads, hidden_size=hidden, opt_level=0)
    print("fused:", optimised.get_fused_operator_statistics(), flush=True)
    optimised.save_model_to_file(str(path))


def _quantize(source: Path, target: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    size = sum(file.stat().st_size for file in source.parent.iterdir())
    quantize_dynamic(
        source,
        target,
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=size > MAX_PROTOBUF,
        extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},  # of fused nodes, whose types it cannot infer
    )
