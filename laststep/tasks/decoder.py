"""The language model: a decoder as in Llama, with rotary positions, RMSNorm, SwiGLU and grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from laststep.tasks.sizes import Size

EPSILON = 1e-5
SPREAD = 0.02  # standard deviation of the initial weights
Rotation = tuple[Tensor, Tensor]  # cosines and sines, (N or 1, 1, T, head width / 2)
Cache = list[list[Tensor]]  # of each block: the keys and values so far; empty before the first token


class Decoder(nn.Module):
    """From tokens (N, T) to logits (N, T, vocabulary). Each position sees itself and those before it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        device = torch.get_default_device()
        with torch.device("meta"):  # torch's own initial weights would only cost time, and draws
            self.embedding = nn.Embedding(size.vocabulary, size.width)
            self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
            self.norm = nn.RMSNorm(size.width, EPSILON)
            self.head = None if size.tied else nn.Linear(size.width, size.vocabulary, bias=False)
        self.to_empty(device=device)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the initial weights, as GPT-2 does: what adds to the residual stream is scaled by its depth.

        There are no buffers, so a model that was made on the meta device needs nothing else after `to_empty`.
        """
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=SPREAD)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
        for block in self.blocks:
            assert isinstance(block, Block)
            for added in (block.attention.out, block.ffn.down):
                nn.init.normal_(added.weight, std=SPREAD / (2 * self.size.layers) ** 0.5)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """With `positions` (N, T) of tokens in their documents, attention does not cross documents. With a `cache`, the
        tokens follow those that it has seen, one at a time but for the first call."""
        mask = None if positions is None else document_mask(positions)
        if positions is None:
            seen = cache[0][0].shape[2] if cache and cache[0] else 0
            positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)[None]
        turns = rotation(positions, self.size.head_width, self.size.rope_base)
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, turns, mask, None if cache is None else cache[number])
        x = self.norm(x)
        return functional.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def new_cache(self) -> Cache:
        """An empty cache."""
        return [[] for _ in self.blocks]


class Block(nn.Module):
    """Attention, then a feed-forward network, each added to what comes in."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width, EPSILON)
        self.attention = Attention(size)
        self.ffn_norm = nn.RMSNorm(size.width, EPSILON)
        self.ffn = SwiGLU(size)

    def forward(self, x: Tensor, turns: Rotation, mask: Tensor | None, cache: list[Tensor] | None) -> Tensor:
        """x: (N, T, width)."""
        x = x + self.attention(self.attention_norm(x), turns, mask, cache)
        return x + self.ffn(self.ffn_norm(x))


class Attention(nn.Module):
    """Causal attention in which several heads of queries share a head of keys and values (Ainslie et al. 2023)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.head_width
        self.shares_keys = size.kv_heads != size.heads
        self.queries = nn.Linear(size.width, size.width, bias=False)
        self.keys = nn.Linear(size.width, size.kv_heads * size.head_width, bias=False)
        self.values = nn.Linear(size.width, size.kv_heads * size.head_width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, turns: Rotation, mask: Tensor | None, cache: list[Tensor] | None) -> Tensor:
        """x: (N, T, width)."""
        length = x.shape[1]
        queries, keys, values = (
            projected.unflatten(2, (-1, self.head_width)).transpose(1, 2)
            for projected in (self.queries(x), self.keys(x), self.values(x))
        )
        queries, keys = rotated(queries, turns), rotated(keys, turns)
        if cache is not None:
            if cache:
                keys, values = torch.cat([cache[0], keys], 2), torch.cat([cache[1], values], 2)
            cache[:] = [keys, values]
        found = functional.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None and length > 1, enable_gqa=self.shares_keys
        )
        return self.out(found.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """A feed-forward network with a gate (Shazeer 2020)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.ffn, bias=False)
        self.up = nn.Linear(size.width, size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, T, width)."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def rotation(positions: Tensor, head_width: int, base: float) -> Rotation:
    """How far queries and keys at these positions (N or 1, T) are turned (Su et al. 2021)."""
    steps = torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, :, None].float() * base ** (-steps / head_width)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, turns: Rotation) -> Tensor:
    """Turn each pair of numbers of x (N, heads, T, head width): the first half is paired with the second."""
    cosines, sines = turns
    first, second = x.chunk(2, dim=3)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], 3).to(x.dtype)


def document_mask(positions: Tensor) -> Tensor:
    """Which positions (N, 1, T, T) may see which: those before them in the same document, which begins at 0."""
    documents = (positions == 0).cumsum(1)
    return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]


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
