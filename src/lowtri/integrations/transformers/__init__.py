"""``attn_implementation="lowtri"`` for the models of the transformers library.

    from lowtri.integrations.transformers import load_model, switch, use

    model = switch(AutoModelForCausalLM.from_pretrained(name))
    model(ids, attention_mask="causal & window(4)")    # a lowtri mask for this forward
    use(model, mask="causal & window(4)")              # for all of them, in training and generate, too
    model.generate(ids, cache=EvictingCache(model))    # a cache that holds what some later query can still see
    model, tokenizer, name = load_model("smollm2")     # a model on this disk, switched, by the name that the command line takes

``switch(model)`` checks that the model calls the registered attention, as most do. ``register()`` makes the name known without this
check; ``from_pretrained(name, attn_implementation="lowtri")`` then uses it.

An attention implementation of transformers has two parts: one makes the mask of a forward pass from a mask function, the other computes
the attention of each layer. Between the two, the mask is a lazy tensor, without a table of pairs.

switching     register, switch; Falcon, which has attention code of its own
user_masks    a lowtri mask on a switched model, for one forward or for all
masks         transformers' mask functions (causal, sliding, chunked, packed, overlays, padding) as lowtri masks
packing       rows that hold several documents: how a call says so, and the mask that follows
lazy          masks as a tensor subclass without a table
caching       EvictingCache: a cache for any switched model, which evicts by the mask
traced_cache  an EvictingCache in programs of torch.compile
attention     the attention of a layer, eager and under torch.compile and torch.export
sharded       a model on one process's part of a sequence
loading       load_model: a model on this disk by its name, switched, and its tokenizer
"""

from lowtri.extras import require

require("lowtri.integrations.transformers", "torch", "transformers")

from lowtri.integrations.transformers.attention import attend
from lowtri.integrations.transformers.caching import EvictingCache
from lowtri.integrations.transformers.loading import load_model
from lowtri.integrations.transformers.switching import register, switch
from lowtri.integrations.transformers.user_masks import use

__all__ = ["EvictingCache", "attend", "load_model", "register", "switch", "use"]
