"""Text from a language model, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from laststep.tasks.decoder import Decoder


@torch.inference_mode()
def generate(
    model: Decoder, prompt: Sequence[int], window: int, temperature: float, seed: int, end: int | None
) -> Iterator[int]:
    """The tokens that follow a prompt, without end unless the model draws the token `end`.

    The model sees at most its window: once that is full, it continues after the second half of it. With `temperature` 0
    each token is the likeliest one.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens, cache = list(prompt)[-window:], model.new_cache()
    given = tokens  # what the model has not seen yet
    while True:
        logits = model(torch.tensor([given], device=device), cache=cache)[0, -1].float().cpu()
        if temperature:
            token = int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == end:
            return
        yield token
        tokens, given = [*tokens, token], [token]
        if len(tokens) > window:
            tokens, cache = tokens[-max(1, window // 2) :], model.new_cache()
            given = tokens
