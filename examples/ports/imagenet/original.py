"""Image classification as in the well-known ImageNet example: torchrun --nproc-per-node 2 original.py --dummy -b 256"""

import argparse
import os
import shutil
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms

parser = argparse.ArgumentParser(description="ImageNet training")
parser.add_argument("data", nargs="?", default="imagenet", help="folder with train/ and val/")
parser.add_argument("-a", "--arch", default="resnet18")
parser.add_argument("-j", "--workers", default=4, type=int)
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("--start-epoch", default=0, type=int)
parser.add_argument("-b", "--batch-size", default=256, type=int, help="of all GPUs together")
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
parser.add_argument("-p", "--print-freq", default=10, type=int)
parser.add_argument("--resume", default="", help="path of a checkpoint")
parser.add_argument("-e", "--evaluate", action="store_true")
parser.add_argument("--seed", default=None, type=int)
parser.add_argument("--image-size", default=224, type=int)
parser.add_argument("--dummy", nargs="?", const=1_281_167, type=int, help="so much fake data instead")
best_acc1 = 0.0


def main():
    args = parser.parse_args()
    if args.seed is not None:
        torch.manual_seed(args.seed)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main_worker(args)
    dist.destroy_process_group()


def main_worker(args):
    global best_acc1
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

    print(f"=> creating model '{args.arch}'")
    model = models.__dict__[args.arch]().to(device)
    model = nn.parallel.DistributedDataParallel(model)

    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)

    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        args.start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])

    if args.dummy:
        size = (3, args.image_size, args.image_size)
        train_dataset = datasets.FakeData(args.dummy, size, 1000, transforms.ToTensor())
        val_dataset = datasets.FakeData(max(args.dummy // 20, 8), size, 1000, transforms.ToTensor())
    else:
        normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        augment = [transforms.RandomResizedCrop(args.image_size), transforms.RandomHorizontalFlip()]
        centre = [transforms.Resize(256), transforms.CenterCrop(args.image_size)]
        train_dataset = datasets.ImageFolder(
            os.path.join(args.data, "train"), transforms.Compose([*augment, transforms.ToTensor(), normalize])
        )
        val_dataset = datasets.ImageFolder(
            os.path.join(args.data, "val"), transforms.Compose([*centre, transforms.ToTensor(), normalize])
        )

    batch_size = args.batch_size // world_size
    train_sampler = DistributedSampler(train_dataset)
    train_loader = DataLoader(train_dataset, batch_size, sampler=train_sampler, num_workers=args.workers)
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    val_loader = DataLoader(val_dataset, batch_size, sampler=val_sampler, num_workers=args.workers)

    if args.evaluate:
        validate(val_loader, model, criterion, device, args)
        return

    for epoch in range(args.start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device, args)
        acc1 = validate(val_loader, model, criterion, device, args)
        scheduler.step()

        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if rank == 0:
            state = {
                "epoch": epoch + 1,
                "arch": args.arch,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            save_checkpoint(state, is_best)


def train(train_loader, model, criterion, optimizer, epoch, device, args):
    batch_time, losses, top1 = AverageMeter("Time"), AverageMeter("Loss"), AverageMeter("Acc@1")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target), images.size(0))

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            print(f"Epoch: [{epoch}][{i}/{len(train_loader)}]", batch_time, losses, top1, sep="\t")


def validate(val_loader, model, criterion, device, args):
    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target), images.size(0))
    losses.all_reduce(device)
    top1.all_reduce(device)
    print(" *", losses, top1)
    return top1.avg


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


class AverageMeter:
    """The last value, and the average so far."""

    def __init__(self, name):
        self.name, self.val, self.avg, self.sum, self.count = name, 0.0, 0.0, 0.0, 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self, device):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32, device=device)
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count

    def __str__(self):
        return f"{self.name} {self.val:.3f} ({self.avg:.3f})"


def accuracy(output, target):
    """The percentage of right answers."""
    with torch.no_grad():
        return (output.argmax(1) == target).float().mean().item() * 100


if __name__ == "__main__":
    main()
