"""The workers of a Ray cluster start the ranks: python -m examples.ray_cluster --name first [key=value ...]"""

import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig

from laststep.frameworks.ray import TorchTrainer


def main() -> None:
    trainer = TorchTrainer(
        sys.argv[1:],  # as for python -m laststep
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
