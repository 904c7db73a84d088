"""Every model type of the installed transformers that has an attention interface, switched over and compared.

    python benchmarks/transformers_models.py --out benchmarks/transformers_models.md       # all of them; goes on where it stopped
    python benchmarks/transformers_models.py --only llama t5 --show                        # a few, with every check

Each type is created with a tiny random config in a process of its own with a time limit. It runs with eager, sdpa and lowtri (and
with lowtri's kernels alone and its formula alone): the forward, padding on either side, the gradients of all weights, and
generation: greedy, beams, a left-padded batch and a static cache. *Equal* means that the difference from eager or from sdpa is
below four times the change of the outputs when each weight is rounded to the next number up or down, plus 8 ulps of the greatest
number (of all gradients, for gradients; there the difference between sdpa and eager counts as rounding, too, if it is below 1e-4
of that number). A type is reached only if lowtri's attention was called. What eager itself does not run is left out.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from small_configs import configs_of, first_line

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PLACES = 24
STEPS = 8
LARGEST = 30_000_000  # parameters

# The class that is made for a type: from the first of these lists that has one with an attention interface.
LISTS = (
    *("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM", "MASKED_LM"),
    *("TEXT_TO_WAVEFORM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "OBJECT_DETECTION"),
    "PRETRAINING",
)


def classes_of(kind: str) -> list[str]:
    """The classes of a model type in the order in which they are tried."""
    from transformers.models.auto import modeling_auto

    found: list[str] = []
    names = [f"MODEL_FOR_{name}_MAPPING_NAMES" for name in LISTS] + ["MODEL_MAPPING_NAMES"]
    names += sorted(name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES") and name not in names)
    for name in names:
        given = getattr(modeling_auto, name, {}).get(kind, ())
        found += [given] if isinstance(given, str) else list(given)
    return list(dict.fromkeys(found))


def has_interface(model_class: Any) -> bool:  # None has not
    """Whether transformers says of a class that sdpa, or any registered attention, reaches it."""
    return bool(
        getattr(model_class, "_supports_sdpa", False) or getattr(model_class, "_supports_attention_backend", False)
    )


def types_of() -> dict[str, list[str]]:
    """Model type -> its classes with an attention interface, in the order in which they are tried."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found = {}
    for kind in sorted(CONFIG_MAPPING_NAMES):
        classes = [(name, getattr(transformers, name, None)) for name in classes_of(kind)]
        names = [name for name, one in classes if has_interface(one) and hasattr(one, "forward")]
        if names:
            found[kind] = names
    return found


def parts_of(config: Any) -> list[Any]:
    """A config and all configs inside it."""
    inner = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(part for one in inner if one is not None for part in parts_of(one))]


def first_of(config: Any, *names: str, default: Any = None) -> Any:
    for part in parts_of(config):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default


def inputs_of(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs that the model may take, likely ones first."""
    import torch

    names = inspect.signature(model.forward).parameters
    config = model.config
    ids = torch.randint(3, 90, (2, PLACES))
    later = {"decoder_input_ids": torch.randint(3, 90, (2, PLACES // 2))} if "decoder_input_ids" in names else {}
    size = first_of(config, "image_size", default=32)
    if isinstance(size, int):
        size = (size, size)
    elif isinstance(size, dict):
        size = size.values()
    height, width = list(size)[:2]
    channels = first_of(config, "num_channels", "in_channels", "in_chans", default=3)
    pixels = torch.randn(2, channels if isinstance(channels, int) else 3, height, width)
    mel = first_of(config, "num_mel_bins", "feature_size", "num_mel_bins", "input_feat_per_channel", default=80)
    frames = first_of(config, "max_source_positions", "max_length", "num_frames", default=50)
    frames = frames if isinstance(frames, int) and frames < 2000 else 50
    sounds = [torch.randn(2, mel, 2 * frames), torch.randn(2, 2 * frames, mel), torch.randn(2, frames, mel)]
    sounds += [torch.randn(2, mel, frames), torch.randn(2, 4000), torch.randn(2, 1, 4000)]
    main = model.main_input_name
    if main == "flattened_patches":
        yield {main: torch.randn(2, 16, 770).abs(), **later}
    if "image_attention_mask" in names:
        yield {
            "input_ids": ids,
            "pixel_values": pixels[:, None],
            "image_attention_mask": torch.ones(2, PLACES, 1, dtype=torch.long),
        }
    if "image_embeds_position_mask" in names:
        places = torch.zeros_like(ids)
        places[:, 1 : 1 + first_of(config, "latent_query_num", default=64)] = 1
        yield {"input_ids": ids, "pixel_values": pixels, "image_embeds_position_mask": places}
    if "query_embeds" in names and "encoder_hidden_states" in names:
        beside = torch.randn(2, 9, first_of(config, "encoder_hidden_size", default=32))
        yield {"query_embeds": torch.randn(2, 4, first_of(config, "hidden_size")), "encoder_hidden_states": beside}
    if main == "input_features":
        sounds += [torch.randn(2, 50, 112)]
    if main == "input_ids" or "input_ids" in names:
        yield {"input_ids": ids, **later}
        yield {"input_ids": ids, "pixel_values": pixels}
        image = first_of(config, "image_token_id", "image_token_index", default=1)
        for n in (first_of(config, "num_query_tokens", "image_seq_length", default=4), 16, 4, 1, 17):
            with_image = ids.clone()
            with_image[:, : n if isinstance(n, int) and n < PLACES else 4] = image
            more = {"qformer_input_ids": ids} if "qformer_input_ids" in names else {}
            yield {"input_ids": with_image, "pixel_values": pixels, **more}
    if main.startswith("pixel") or "pixel_values" in names:
        video = torch.randn(
            2, first_of(config, "num_frames", "tubelet_size", default=4), pixels.shape[1], height, width
        )
        for image in (pixels, video, video.transpose(1, 2)):
            name = main if main.startswith("pixel") else "pixel_values"
            yield {name: image}
            yield {name: image, **later}
            yield {name: image, "input_ids": ids}
    for name in dict.fromkeys((main, "input_features", "input_values", "inputs_embeds")):
        if name in names and name not in ("input_ids", "inputs_embeds") and not name.startswith("pixel"):
            for sound in sounds:
                yield {name: sound, **later}
    if "inputs_embeds" in names:
        yield {"inputs_embeds": torch.randn(2, PLACES, first_of(config, "hidden_size", "d_model", default=32))}
    patch = first_of(config, "patch_size", default=8)
    patch = patch if isinstance(patch, int) else patch[0]
    flat = first_of(config, "in_channels", "in_chans", "num_channels", default=3) * patch * patch
    for grid_name in ("grid_thw", "image_grid_thw"):
        if grid_name in names:
            grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
            for size in (flat * first_of(config, "temporal_patch_size", default=2), flat):
                for name in ("hidden_states", "pixel_values"):
                    yield {name: torch.randn(32, size), grid_name: grid}
            yield {"pixel_values": torch.randn(32, 3, patch, patch), grid_name: grid}
    for name in ("input_features", "input_values"):  # sounds that come with a mask of their own
        other = f"{name}_mask" if f"{name}_mask" in names else "attention_mask"
        if name in names and other in names:
            for sound in sounds:
                for length in sorted({sound.shape[-1], sound.shape[1]}):
                    yield {name: sound, other: torch.ones(2, length, dtype=torch.long), **later}
                    yield {name: sound, other: torch.ones(2, length, dtype=torch.bool), **later}
    needed = [n for n, p in names.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    wide = first_of(config, "hidden_size", "d_model", default=32)
    guesses: dict[str, Any] = {"input_ids": ids, "qformer_input_ids": ids, "pixel_values": pixels, **later}
    guesses |= {name: torch.ones(2, 50, dtype=torch.bool) for name in ("input_features_mask", "audio_mel_mask")}
    guesses |= {"input_features": torch.randn(2, 50, mel), "audio_mel": torch.randn(2, 50, mel)}
    guesses |= {name: torch.randn(2, 4, wide) for name in ("query_embeds", "context_hidden_states", "hidden_states")}
    if needed and needed != [main] and all(name in guesses for name in needed):
        yield {name: guesses[name] for name in needed}


def tensors_of(output: Any) -> dict[str, Any]:
    """The float tensors of a model's output by name; caches are left out."""
    import torch
    from torch.utils._pytree import tree_flatten

    found = {}
    if hasattr(output, "items"):
        items = output.items()
    else:
        items = enumerate(output if isinstance(output, tuple) else (output,))
    for name, value in items:
        if "past_key_values" in str(name) or "cache" in str(name):
            continue
        for i, x in enumerate(tree_flatten(value)[0]):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                found[f"{name}.{i}"] = x
    return found


def real_part(x: Any, keep: Any) -> Any:
    """What stands at real tokens, where the tensor goes by token; some models add one of their own at the end."""
    import torch

    if keep is None or x.ndim < 2 or x.shape[0] != keep.shape[0] or x.shape[1] - keep.shape[1] not in (0, 1):
        return x
    return x[torch.nn.functional.pad(keep, (0, x.shape[1] - keep.shape[1]), value=True)]


class Asked:
    """One model, its inputs, and what eager, sdpa and lowtri answer."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        self.model = model
        self.inputs = inputs
        self.checks: dict[str, str] = {}
        self.worst = 0.0

    def switch(self, name: str) -> None:
        import torch

        self.model.set_attn_implementation(name)
        torch.manual_seed(0)

    def forward(self, name: str, more: dict[str, Any], keep: Any, gradient: bool) -> dict[str, Any]:
        import torch

        self.switch(name)
        self.model.zero_grad()
        with torch.set_grad_enabled(gradient):
            found = tensors_of(self.model(**self.inputs, **more))
        found = {k: real_part(x, keep) for k, x in found.items()}
        if not gradient:
            return found
        draw = torch.Generator().manual_seed(3)
        loss = sum(
            (x * torch.randn(x.shape, generator=draw).to(x.dtype)).sum() for x in found.values() if x.requires_grad
        )
        loss.backward()
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def noise(self, more: dict[str, Any], keep: Any, gradient: bool, eager: dict[str, Any]) -> dict[str, float]:
        """How far each output moves when every weight is rounded up or down."""
        import torch

        kept = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        moved = dict.fromkeys(eager, 0.0)
        for seed in range(3):
            draw = torch.Generator().manual_seed(100 + seed)
            for name, p in self.model.named_parameters():
                up = torch.randint(0, 2, p.shape, generator=draw).bool()
                p.data = torch.nextafter(kept[name], torch.where(up, torch.inf, -torch.inf).to(p.dtype))
            for name, x in self.forward("eager", more, keep, gradient).items():
                if name in eager and x.shape == eager[name].shape:
                    moved[name] = max(moved[name], distance(x, eager[name]))
        for name, p in self.model.named_parameters():
            p.data = kept[name]
        return moved

    def compare(self, what: str, more: dict[str, Any], keep: Any, gradient: bool, engines: tuple[str, ...]) -> None:
        """One forward or backward by all roads; what differs is written down."""
        import torch

        try:
            eager = self.forward("eager", more, keep, gradient)
        except Exception as error:
            self.checks[what] = f"eager does not run: {first_line(error)}"
            return
        try:
            sdpa = self.forward("sdpa", more, keep, gradient)
        except Exception:
            sdpa = eager
        noise = self.noise(more, keep, gradient, eager)
        top = max((float(x.abs().max()) for x in eager.values() if x.numel()), default=0.0) if gradient else None
        by_sdpa = max((distance(sdpa[n], x) for n, x in eager.items() if n in sdpa), default=0.0) if top else 0.0
        by_sdpa = by_sdpa if top and by_sdpa < 1e-4 * top else 0.0
        for engine in engines:
            try:
                found = self.forward(engine, more, keep, gradient)
            except Exception as error:
                self.checks[what] = f"{engine}: {first_line(error)}"
                return
            if set(found) != set(eager):
                self.checks[what] = f"{engine}: other outputs, {sorted(set(found) ^ set(eager))[:2]}"
                return
            for name, x in found.items():
                # What cancels in a gradient is rounding of numbers as large as the others: hence the greatest of all.
                scale = top or (float(eager[name].abs().max()) if x.numel() else 0.0)
                allowed = 4 * max(noise[name], by_sdpa) + 8 * torch.finfo(torch.float32).eps * scale
                off = min(distance(x, eager[name]), distance(x, sdpa.get(name, eager[name])))
                if not off <= allowed:
                    self.checks[what] = f"{engine}: {name} differs by {off:.2g}, {allowed:.2g} allowed"
                    return
                self.worst = max(self.worst, off / allowed if allowed else 0.0)
        self.checks[what] = "equal"

    def generate(self, what: str, more: dict[str, Any], engines: tuple[str, ...]) -> None:
        import torch

        options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, **more}
        inputs = {k: v for k, v in self.inputs.items() if k != "decoder_input_ids"}
        answers = {}
        for name in ("eager", "sdpa", *engines):
            try:
                self.switch(name)
                with torch.no_grad():
                    answers[name] = self.model.generate(**inputs, **options)
            except Exception as error:
                if name == "eager":
                    self.checks[what] = f"eager does not run: {first_line(error)}"
                    return
                if name in engines:
                    self.checks[what] = f"{name}: {first_line(error)}"
                    return
        same = [any(equal(answers[e], answers.get(n)) for n in ("eager", "sdpa")) for e in engines]
        self.checks[what] = "equal" if all(same) else f"{engines[same.index(False)]}: other tokens"


def distance(x: Any, y: Any) -> float:
    import torch

    if x.shape != y.shape:
        return float("inf")
    if x.numel() == 0:
        return 0.0
    if not torch.equal(x.isfinite(), y.isfinite()):
        return float("inf")
    return float((x - y)[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0


def equal(x: Any, y: Any) -> bool:
    import torch

    x, y = (getattr(one, "sequences", one) for one in (x, y))
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.shape == y.shape and torch.equal(x, y)


def made(kind: str, classes: list[str]) -> tuple[Any, dict[str, Any]]:
    """A tiny model and inputs that its eager road takes; raises the first trouble where none can be made."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    trouble: Exception | None = None
    configs = list(configs_of(CONFIG_MAPPING[kind]))
    for config, class_name in ((config, name) for name in classes[:3] for config in configs):
        try:
            if isinstance(config, Exception):
                raise config
            model_class = getattr(transformers, class_name)
            torch.manual_seed(0)
            config._attn_implementation = "eager"
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            if size > LARGEST:
                raise ValueError(f"{size:,} parameters are not tiny")
            model = model_class(config).eval()
            if (
                model.can_generate()
                and config.is_encoder_decoder
                and model.generation_config.decoder_start_token_id is None
            ):
                model.generation_config.decoder_start_token_id = 1
        except Exception as error:
            trouble = trouble or error
            continue
        with torch.no_grad():
            for p in model.parameters():
                if p.is_floating_point():
                    p.nan_to_num_(0.0).add_((0.02 if kind == "mobilebert" else 0.15) * torch.randn_like(p))
        for inputs in inputs_of(model):
            try:
                with torch.no_grad():
                    out = tensors_of(model(**inputs))
                if out and all(bool(x.isfinite().all()) for x in out.values()):
                    return model, inputs
                trouble = trouble or ValueError("its outputs are not finite")
            except Exception as error:
                trouble = trouble or error
    raise trouble or ValueError("no inputs found")


def try_one(kind: str, classes: list[str]) -> dict[str, Any]:
    """One type: what was checked, and the verdict."""
    import torch
    import transformers

    from lowtri.integrations.transformers import switching as door

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"type": kind, "class": classes[0]}
    calls = [0]
    attend = door.attend

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return attend(*args, **options)

    door.attend = counted
    door.register()
    door.register("lowtri-cpu", engine="cpu")
    door.register("lowtri-formula", engine="formula")
    try:
        model, inputs = made(kind, classes)
    except Exception as error:
        return result | {"verdict": "not made", "why": first_line(error)}
    result["class"] = type(model).__name__
    asked = Asked(model, inputs)
    engines = ("lowtri", "lowtri-formula", "lowtri-cpu")
    asked.compare("forward", {}, None, False, engines)
    result |= {"inputs": sorted(inputs), "calls": calls[0]}
    if asked.checks["forward"] == "equal" and not calls[0]:
        return result | {"verdict": "not reached", "why": "its attention does not ask the attention interface"}
    if asked.checks["forward"] != "equal":
        return result | {"verdict": verdict(asked.checks), "why": asked.checks["forward"], "checks": asked.checks}
    if "input_ids" in inputs and "attention_mask" in inspect.signature(model.forward).parameters:
        for side, cut in (("left", slice(None, 7)), ("right", slice(-7, None))):
            pads = torch.ones(inputs["input_ids"].shape, dtype=torch.long)
            pads[0, cut] = 0
            keep = pads.bool() if "decoder_input_ids" not in inputs else None
            asked.compare(f"padding {side}", {"attention_mask": pads}, keep, False, engines)
    asked.compare("gradients", {}, None, True, engines[:1] + engines[2:])
    if model.can_generate():
        asked.generate("greedy", {}, engines)
        asked.generate("beams", {"num_beams": 3}, engines[:1])
        if "input_ids" in inputs:
            pads = torch.ones(inputs["input_ids"].shape, dtype=torch.long)
            pads[0, :7] = 0
            asked.generate("left-padded", {"attention_mask": pads}, engines)
            asked.generate("static cache", {"attention_mask": pads, "cache_implementation": "static"}, engines[:1])
    wrong = {k: v for k, v in asked.checks.items() if v != "equal" and not v.startswith("eager does not run")}
    why = "; ".join(f"{k}: {v}" for k, v in wrong.items())
    return result | {
        "verdict": verdict(asked.checks),
        "why": why,
        "checks": asked.checks,
        "worst": round(asked.worst, 2),
    }


def verdict(checks: dict[str, str]) -> str:
    wrong = [v for v in checks.values() if v != "equal" and not v.startswith("eager does not run")]
    if any("CallError" in v or "MaskError" in v or "EngineError" in v for v in wrong):
        return "refused"
    if wrong:
        return "differs"
    return "equal" if "equal" in checks.values() else "not made"


def limited(kind: str, classes: list[str], limit: float) -> dict[str, Any]:
    """`try_one` in a process of its own that is ended when it takes too long."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def work() -> None:
        try:
            send.send(try_one(kind, classes))
        except BaseException as error:
            send.send({"type": kind, "class": classes[0], "verdict": "not made", "why": first_line(error)})  # type: ignore[arg-type]

    process = context.Process(target=work)
    process.start()
    result = {"type": kind, "class": classes[0], "verdict": "not made", "why": f"took longer than {limit:.0f} s"}
    if receive.poll(limit):
        try:
            result = receive.recv()
        except EOFError:
            result["why"] = "the process ended"
    process.kill()
    process.join()
    return result


# Why lowtri's attention was never called; read in the source of transformers 5.23.0.
_BY_NAME = "its constructor takes the attention class from a table of its own; another name raises KeyError"
UNDERSTOOD = dict.fromkeys(("data2vec-vision", "falcon", "sam_vision_model", "sam_hq_vision_model"), _BY_NAME)

ORDER = ("differs", "refused", "not reached", "not made", "equal")


def as_table(results: list[dict[str, Any]], version: str) -> str:
    """The results as Markdown: counts, what is not equal with its reason, then those that are."""
    counts = {name: sum(r["verdict"] == name for r in results) for name in ORDER[::-1]}
    lines = [
        f"# Models of transformers {version} on lowtri",
        "",
        ", ".join(f"{name} {count}" for name, count in counts.items() if count) + f"; {len(results)} types in all.",
        "",
        *(line.strip() for line in (__doc__ or "").split("\n\n")[2].splitlines()),
        "",
        "Produced by `python benchmarks/transformers_models.py --out ...` "
        + time.strftime("on %d %B %Y")
        + ": float32 on CPU. "
        "*Not made* means a config that",
        "our tiny sizes do not fit, inputs that the script does not know, or a missing package; it says nothing about the model.",
        "",
        "| type | class | verdict | what |",
        "|---|---|---|---|",
    ]
    for r in sorted(results, key=lambda r: (ORDER.index(r["verdict"]), r["type"])):
        checks = r.get("checks", {})
        done = ", ".join(name for name, answer in checks.items() if answer == "equal")
        why = UNDERSTOOD.get(r["type"], r["why"]) if r["verdict"] == "not reached" else r["why"]
        what = (why if r["verdict"] != "equal" else done).replace("|", "/").replace("\n", " ")
        lines.append(f"| {r['type']} | {r.get('class', '')} | {r['verdict']} | {what} |")
    return "\n".join(lines) + "\n"


def write(path: Path, text: str, results: list[dict[str, Any]]) -> None:
    """The table and the figures behind it, each written atomically."""
    from lowtri.files import write_text

    path.parent.mkdir(parents=True, exist_ok=True)
    for target, content in ((path, text), (path.with_suffix(".json"), json.dumps(results, indent=1))):
        write_text(target, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each type")
    parser.add_argument(
        "--out", type=Path, help="write the table here, and .json beside it; types already there are kept"
    )
    parser.add_argument("--again", nargs="*", default=[], help="verdicts to try again")
    parser.add_argument("--show", action="store_true", help="print every check")
    arguments = parser.parse_args()

    import transformers

    import lowtri.integrations.transformers  # noqa: F401

    transformers.logging.set_verbosity_error()
    known = types_of()
    beside = arguments.out.with_suffix(".json") if arguments.out else None
    results = json.loads(beside.read_text(encoding="utf-8")) if beside and beside.exists() else []
    kept = {r["type"]: r for r in results if r["type"] in known and r["verdict"] not in arguments.again}
    for kind in arguments.only or sorted(known):
        if kind in kept and not arguments.only:
            continue
        started = time.monotonic()
        kept[kind] = result = limited(kind, known[kind], arguments.limit)
        print(
            f"{kind:28} {result['verdict']:12} {time.monotonic() - started:5.1f} s  {result['why'][:150]}", flush=True
        )
        if arguments.show:
            print(json.dumps(result, indent=1))
        if arguments.out:
            write(arguments.out, as_table(list(kept.values()), transformers.__version__), list(kept.values()))
    if not arguments.out:
        print(as_table(list(kept.values()), transformers.__version__))


if __name__ == "__main__":
    main()
