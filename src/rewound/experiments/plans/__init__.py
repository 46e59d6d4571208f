"""From rows asked for to rows measured: what is missing and in which order, how it becomes tensors, what came out."""
