"""Classification in the manner of torchvision's references: torchrun --nproc-per-node 2 original.py --model-ema"""

import argparse
import datetime
import os
import time
from collections import defaultdict, deque

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler, default_collate
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms

import laststep

run = laststep.run()


class SmoothedValue:
    def __init__(self, window_size=20):
        self.deque, self.total, self.count = deque(maxlen=window_size), 0.0, 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    def synchronize_between_processes(self, device):
        t = torch.tensor([self.count, self.total], dtype=torch.float64, device=device)
        dist.all_reduce(t)
        self.count, self.total = int(t[0]), t[1].item()

    @property
    def global_avg(self):
        return self.total / max(self.count, 1)

    def __str__(self):
        return f"{sum(self.deque) / max(len(self.deque), 1):.4f} ({self.global_avg:.4f})"


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def synchronize_between_processes(self, device):
        for meter in self.meters.values():
            meter.synchronize_between_processes(device)

    def log_every(self, iterable, print_freq, header):
        start_time = time.time()
        for i, obj in enumerate(iterable):
            yield obj
            if i % print_freq == 0:
                print(header, f"[{i}/{len(iterable)}]", *(f"{name}: {meter}" for name, meter in self.meters.items()))
        print(f"{header} Total time: {datetime.timedelta(seconds=int(time.time() - start_time))}")


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay, device):
        def ema_avg(avg_model_param, model_param, num_averaged):
            return decay * avg_model_param + (1 - decay) * model_param

        super().__init__(model, device, ema_avg, use_buffers=True)


class RASampler(Sampler):
    """Each sample several times in a row, with another augmentation each time, on another rank."""

    def __init__(self, dataset, num_replicas=None, rank=None, repetitions=3):
        self.dataset, self.repetitions, self.epoch = dataset, repetitions, 0
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        self.num_samples = len(dataset) // self.num_replicas

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.epoch)
        indices = torch.randperm(len(self.dataset), generator=g).repeat_interleave(self.repetitions).tolist()
        return iter(indices[self.rank :: self.num_replicas][: self.num_samples])

    def __len__(self):
        return self.num_samples

    def set_epoch(self, epoch):
        self.epoch = epoch


def mixup(batch, num_classes, alpha):
    image, target = default_collate(batch)
    target = nn.functional.one_hot(target, num_classes).float()
    lam = torch.distributions.Beta(alpha, alpha).sample()
    return image * lam + image.roll(1, 0) * (1 - lam), target * lam + target.roll(1, 0) * (1 - lam)


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema=None, scaler=None):
    model.train()
    metric_logger = MetricLogger()
    for image, target in metric_logger.log_every(run.steps(data_loader), args.print_freq, f"Epoch: [{epoch}]"):
        image, target = image.to(device), target.to(device)
        with torch.amp.autocast(device.type, enabled=scaler is not None):
            loss = criterion(model(image), target)

        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()

        if model_ema and run.step % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.n_averaged.fill_(0)  # keep copying the weights

        metric_logger.meters["loss"].update(loss.item(), len(image))


def evaluate(model, criterion, data_loader, device, log_suffix=""):
    model.eval()
    metric_logger = MetricLogger()
    with torch.inference_mode():
        for image, target in metric_logger.log_every(run.validation(data_loader), 100, f"Test: {log_suffix}"):
            image, target = image.to(device), target.to(device)
            output = model(image)
            metric_logger.meters["loss"].update(criterion(output, target).item(), len(image))
            metric_logger.meters["acc1"].update((output.argmax(1) == target).float().mean().item() * 100, len(image))
    metric_logger.synchronize_between_processes(device)
    print(f"Test: {log_suffix} Acc@1 {metric_logger.meters['acc1'].global_avg:.3f}")
    return metric_logger.meters["acc1"].global_avg


def load_data(args):
    if args.fake_data:
        size = (3, args.train_crop_size, args.train_crop_size)
        dataset = datasets.FakeData(args.fake_data, size, args.num_classes, transforms.ToTensor())
        return dataset, datasets.FakeData(args.fake_data // 4, size, args.num_classes, transforms.ToTensor())
    crop = args.train_crop_size
    augment = [transforms.RandomResizedCrop(crop), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    centre = [transforms.Resize(crop), transforms.CenterCrop(crop), transforms.ToTensor()]
    return (
        datasets.ImageFolder(os.path.join(args.data_path, "train"), transforms.Compose(augment)),
        datasets.ImageFolder(os.path.join(args.data_path, "val"), transforms.Compose(centre)),
    )


def main(args):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device(args.device)
    dataset, dataset_test = load_data(args)
    train_sampler = RASampler(dataset, 1, 0, args.ra_reps) if args.ra_reps else None
    test_sampler = DistributedSampler(dataset_test, shuffle=False)

    def collate_fn(batch):
        return mixup(batch, args.num_classes, args.mixup_alpha) if args.mixup_alpha else default_collate(batch)

    data_loader = run.loader(
        dataset, args.batch_size * run.size, sampler=train_sampler, num_workers=args.workers, collate_fn=collate_fn
    )
    data_loader_test = DataLoader(
        dataset_test, batch_size=args.batch_size, sampler=test_sampler, num_workers=args.workers
    )

    print("Creating model")
    model = models.get_model(args.model, num_classes=args.num_classes).to(device)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.sync_bn else model
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    norms = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    others = [p for p in model.parameters() if all(p is not norm for norm in norms)]
    groups = [{"params": others}, {"params": norms, "weight_decay": args.norm_weight_decay}]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scaler = torch.amp.GradScaler(device.type) if args.amp else None

    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=args.lr_warmup_epochs)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(args.epochs - args.lr_warmup_epochs, 1))
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [args.lr_warmup_epochs])

    model = nn.parallel.DistributedDataParallel(model)
    model_without_ddp = model.module
    model_ema = ExponentialMovingAverage(model_without_ddp, args.model_ema_decay, device) if args.model_ema else None

    print("Start training")
    start_time = time.time()
    run.restore(model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, model_ema=model_ema, scaler=scaler)
    for epoch in run.epochs(args.epochs):
        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema, scaler)
        lr_scheduler.step()
        evaluate(model, criterion, data_loader_test, device=device)
        if model_ema:
            evaluate(model_ema, criterion, data_loader_test, device=device, log_suffix="EMA")
        if args.output_dir and dist.get_rank() == 0:
            checkpoint = {
                "model": model_without_ddp.state_dict(),
                "optimizer": optimizer.state_dict(),
                "lr_scheduler": lr_scheduler.state_dict(),
                "model_ema": model_ema.state_dict() if model_ema else None,
                "epoch": epoch,
            }
            torch.save(checkpoint, os.path.join(args.output_dir, "checkpoint.pth"))
    print(f"Training time {datetime.timedelta(seconds=int(time.time() - start_time))}")


def get_args_parser():
    parser = argparse.ArgumentParser(description="Classification training")
    parser.add_argument("--data-path", default="imagenet")
    parser.add_argument("--fake-data", default=0, type=int, help="train on this number of fake samples instead")
    parser.add_argument("--num-classes", default=1000, type=int)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-b", "--batch-size", default=32, type=int, help="of each GPU")
    parser.add_argument("--epochs", default=90, type=int)
    parser.add_argument("-j", "--workers", default=16, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
    parser.add_argument("--norm-weight-decay", default=0.0, type=float)
    parser.add_argument("--label-smoothing", default=0.0, type=float)
    parser.add_argument("--mixup-alpha", default=0.0, type=float)
    parser.add_argument("--lr-warmup-epochs", default=5, type=int)
    parser.add_argument("--print-freq", default=10, type=int)
    parser.add_argument("--output-dir", default=".")
    parser.add_argument("--start-epoch", default=0, type=int)
    parser.add_argument("--sync-bn", action="store_true")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--model-ema", action="store_true")
    parser.add_argument("--model-ema-steps", default=32, type=int)
    parser.add_argument("--model-ema-decay", default=0.99998, type=float)
    parser.add_argument("--train-crop-size", default=224, type=int)
    parser.add_argument(
        "--ra-reps", default=0, type=int, help="repetitions of each sample; 0: no repeated augmentation"
    )
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
