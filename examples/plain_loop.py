"""A plain DDP loop, written by hand: torchrun --nproc-per-node 2 -m examples.plain_loop"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets
from torchvision.transforms import v2

from laststep.data.catalog import MNIST_5K

EPOCHS, BATCH_SIZE = 5, 64


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


def network() -> nn.Module:
    classify = nn.Sequential(nn.Linear(1600, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 10))
    return nn.Sequential(block(1, 32), block(32, 64), nn.Flatten(), classify)


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)

    pixels = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.1307], [0.3081])]
    train_set = datasets.MNIST(MNIST_5K, train=True, transform=v2.Compose([v2.RandomCrop(28, padding=2), *pixels]))
    val_set = datasets.MNIST(MNIST_5K, train=False, transform=v2.Compose(pixels))
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, BATCH_SIZE // size, sampler=sampler)
    val_loader = DataLoader(val_set, BATCH_SIZE, sampler=DistributedSampler(val_set, shuffle=False))

    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=EPOCHS * len(loader))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

        model.eval()
        hits = torch.zeros((), device=device)
        with torch.no_grad():
            for images, labels in val_loader:
                images, labels = images.to(device), labels.to(device)
                hits += (model(images).argmax(1) == labels).sum()
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {hits / len(val_set):.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
