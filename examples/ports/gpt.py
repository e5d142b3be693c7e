"""gpt_before.py, ported: laststep --nodes 2 task=examples.ports.gpt.main"""

import math

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from examples.ports.data import text
from laststep import Run

ITERATIONS, WARM_UP, EVAL_EVERY = 300, 20, 50
BATCH_SIZE, MICRO_STEPS, BLOCK, WIDTH, RATE = 8, 2, 64, 64, 1e-3


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        hidden = self.tokens(x) + self.places.weight[: x.shape[1]]
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def rate(iteration: int) -> float:
    if iteration < WARM_UP:
        return RATE * (iteration + 1) / WARM_UP
    return RATE * (0.55 + 0.45 * math.cos(math.pi * (iteration - WARM_UP) / (ITERATIONS - WARM_UP)))


def main(run: Run) -> None:
    rank, device = run.rank, run.device
    train, held_out = text().tensor_split([-10_000])

    def get_batch(data: Tensor) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - BLOCK, (BATCH_SIZE,)).tolist()
        x, y = (torch.stack([data[start + shift : start + shift + BLOCK] for start in starts]) for shift in (0, 1))
        return x.to(device), y.to(device)

    model = DDP(GPT().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    run.restore(model=model, optimizer=optimizer)

    for iteration in run.steps(count=ITERATIONS):
        for group in optimizer.param_groups:
            group["lr"] = rate(iteration)
        for micro_step in range(MICRO_STEPS):
            model.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
            loss = model(*get_batch(train)) / MICRO_STEPS
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if iteration % EVAL_EVERY == 0 and rank == 0:
            with torch.no_grad():
                print(f"iteration {iteration}: loss {model.module(*get_batch(held_out)).item():.3f}")
