python examples/why_mask   # in a checkout of lowtri; about two minutes
