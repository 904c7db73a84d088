"""A language model from text files: the start of a training program of your own.

    python examples/train/train.py book.txt notes.txt --out out/book
    python examples/train/train.py *.txt --out out/llama --config llama --mask "causal & window(64)" --bf16
    torchrun --nproc-per-node 4 examples/train/train.py *.txt --out out/texts --context 4096 --sp 2

Each file is a document that sees no other. The model is a lowtri.nn.Decoder, or with --config one of transformers. Under torchrun
its weights are sharded over all processes (FSDP2), and --sp processes share the tokens of a row by its mask. The same command resumes
a run that was killed, on any number of processes. Afterwards: lowtri generate out/book "Once upon a time"
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import lowtri
from corpus import BEGIN, BYTES, END, IGNORED, Packed, Recipe, Rows, read_corpus, rows_of_step, split
from lowtri.errors import DataError
from lowtri.nn import Decoder, DecoderConfig, RecurrentLM
from lowtri.parallel import ContextParallel, plan_shards
from processes import claim, full_weights, processes, resume, save, shard, total


class Run:
    """A model in training on packed documents; with a mesh ("dp", "sp") on its processes, which all make the same calls."""

    def __init__(self, model: Any, corpus: Packed, recipe: Recipe, mask: str, mesh: DeviceMesh | None = None) -> None:
        self.model, self.corpus, self.recipe, self.mesh = model, corpus, recipe, mesh
        self.mask, self.done = lowtri.mask(mask), 0  # steps
        self.rows, self.held_out = split(corpus.count(recipe.context), recipe.held_out)
        matrices: Any = {"params": [w for w in model.parameters() if w.dim() >= 2], "weight_decay": recipe.weight_decay}
        others: Any = {"params": [w for w in model.parameters() if w.dim() < 2], "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW([matrices, others], lr=recipe.lr, betas=(0.9, 0.95), fused=True)

    def train(self) -> Iterator[float]:
        """Take the steps that are left. Yields the loss of each: the mean over its targets before the update, in nats a token."""
        recipe = self.recipe
        rank, world = (0, 1) if self.mesh is None else (self.mesh.get_rank(), self.mesh.size())
        while self.done < recipe.steps:
            rows = self.corpus.rows(rows_of_step(self.rows, self.done, recipe), recipe.context)
            torch.manual_seed(recipe.seed_at(self.done, rank))
            for group in self.optimizer.param_groups:
                group["lr"] = recipe.lr_at(self.done)
            self.model.train()
            # A sum, divided by the targets of all processes: a mean of their means would weigh targets unequally.
            loss = self.loss(rows) * (world / rows.predicted)  # FSDP divides gradients by the number of processes
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1
            mean = total(loss, self.mesh) / world
            if not math.isfinite(mean):
                raise DataError(f"the loss is {mean} at step {self.done}.\nFix: an lr below {recipe.lr}")
            yield mean

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss on the rows held out, in nats a token."""
        self.model.eval()
        losses, count = 0.0, 0
        for start in range(0, len(self.held_out), self.recipe.batch):
            rows = self.corpus.rows(self.held_out[start : start + self.recipe.batch], self.recipe.context)
            losses += total(self.loss(rows), self.mesh)
            count += rows.predicted
        return losses / max(1, count)

    def loss(self, rows: Rows) -> Tensor:
        """The sum of the losses of this process's part of a batch."""
        if self.mesh is not None:
            rows = rows.share(self.mesh.get_local_rank("dp"), self.mesh["dp"].size())
        ids, targets = torch.from_numpy(rows.inputs), torch.from_numpy(rows.targets)  # (B, N)
        mask, context = self.mask, None
        if (rows.documents != rows.documents[:, :1]).any():  # rows of one document each run faster with the mask alone
            mask = mask & lowtri.documents(rows.documents)
        if self.mesh is not None and self.mesh["sp"].size() > 1:
            context = ContextParallel(plan_shards(mask, ids.shape[1], self.mesh["sp"].size()), self.mesh["sp"])
            targets = context.shard(targets)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.bf16):
            logits = forward(self.model, ids, mask, context)  # (B, N, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def forward(model: Any, ids: Tensor, mask: lowtri.Mask, context: ContextParallel | None) -> Tensor:
    """Logits (B, N, V); with a context those of this process's tokens alone."""
    if not isinstance(model, Decoder | RecurrentLM):
        from lowtri.integrations.transformers import use

        return use(model, mask=mask, context_parallel=context)(ids, use_cache=False).logits
    if context is None:
        return model(ids, mask=mask)
    return model(context.shard(ids), mask=mask, positions=context.positions, attend=context.attend)


def make_model(options: argparse.Namespace, tokenizer: Tokenizer) -> Any:
    """A Decoder, or with --config a model of transformers; its weights follow from the seed."""
    torch.manual_seed(options.seed)
    end: Any = tokenizer.token_to_id(END)
    sizes = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "max_position_embeddings": options.context,
    }
    if options.config is None:
        return Decoder(DecoderConfig(**sizes, mask=options.mask, eos_token_id=(end,)))
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowtri.integrations.transformers import switch

    tokens = {"bos_token_id": tokenizer.token_to_id(BEGIN), "eos_token_id": end}
    if Path(options.config).exists():  # its sizes, but for those that follow from the text
        config = AutoConfig.from_pretrained(options.config, vocab_size=sizes["vocab_size"], **tokens)
    else:
        sizes |= {"intermediate_size": 4 * options.hidden, "num_key_value_heads": options.heads}
        config = AutoConfig.for_model(options.config, **sizes, **tokens)
    return switch(AutoModelForCausalLM.from_config(config))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="text files, UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--mask", default="causal", help="who may see whom, instead of a model's own pattern")
    parser.add_argument("--config", help="a model type of transformers (llama, mistral, ...), or a config.json")
    parser.add_argument("--vocabulary", type=int, default=4096, help=f"tokens to learn; {BYTES} is bytes alone")
    for name, default in {"hidden": 256, "layers": 4, "heads": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sp", type=int, default=1, help="processes that share the tokens of a row")
    parser.add_argument("--prompt", default="The", help="what the sample at the end continues")
    for field in fields(Recipe):
        kind = {"action": "store_true"} if field.default is False else {"type": type(field.default)}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **kind)
    return parser.parse_args(arguments)


def save_model(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that lowtri generate reads, and transformers too if the model is one of its own."""
    if isinstance(model, Decoder):
        model.save(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        return
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END).save_pretrained(folder)


def train(options: argparse.Namespace, mesh: DeviceMesh) -> None:
    """The whole run, on each of its processes."""
    recipe = Recipe(**{field.name: getattr(options, field.name) for field in fields(Recipe)})
    tokenizer, corpus = read_corpus(options.files, options.vocabulary)
    corpus.require(recipe.context)
    claim(options.out, vars(options), corpus.digest())
    is_main = mesh.get_rank() == 0
    is_causal = lowtri.mask(options.mask).is_causal(recipe.context)
    if is_main and not is_causal:
        print(f"the mask {options.mask} shows what is predicted: this loss means nothing", file=sys.stderr)
    model = make_model(options, tokenizer)
    if mesh.size() > 1:
        shard(model)
    run = Run(model, corpus, recipe, options.mask, mesh)
    run.done = resume(options.out / "state", model, run.optimizer)
    for loss in run.train():
        if run.done % recipe.every == 0 or run.done == recipe.steps:
            validation = run.validate()
            save(options.out / "state", run.done, model, run.optimizer)
            if is_main:
                print(f"step {run.done}: loss {loss:.4f}, held out {validation:.4f} nats a token", flush=True)
    weights = full_weights(model)
    if is_main:
        whole = make_model(options, tokenizer)
        whole.load_state_dict(weights)
        save_model(whole, tokenizer, options.out)
        if is_causal:
            pieces = lowtri.generate(whole.eval(), options.prompt, tokenizer=tokenizer)
            print(options.prompt + "".join(piece for _, piece in zip(range(40), pieces, strict=False)))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with processes(options.sp) as mesh:
        train(options, mesh)


if __name__ == "__main__":
    main()
