"""`replay --nodes` on a real Slurm: a step done again by a job."""

from __future__ import annotations

from tests.slurm.user import User

TINY = ("data.name=fake", "data.args.samples=64", "data.args.image_size=8", "train.batch_size=8", "train.max_steps=6")


def test_a_job_does_it_again(user: User) -> None:
    """What two ranks of one node did, a job does again on two nodes, in a run of its own beside it: the command stays,
    and says that it is the same. Nobody restarts the job, although its ranks end before the run does. Where it has
    another number of ranks nothing is submitted."""
    size = ("--nodes", "1", "--tasks-per-node", "2", "--follow")
    saves = ("checkpoint.every_steps=3", "checkpoint.keep_last=9", "train.digest_every=2")
    user.types("--name", "done-again", *size, *TINY, *saves)
    replay = ("replay", "done-again", "--step", "4", "--to", "5")
    said = user.types(*replay, "--nodes", "2", status=2)
    assert "error: 4 ranks (launch.nodes=2): done-again has no train.shares, so only 2 ranks can compute" in said
    assert not list(user.root.glob("done-again-replay*")), "nothing is left of what was refused"
    said = user.types(*replay, "--nodes", "2", "--tasks-per-node", "1")
    assert "replay done-again from the checkpoint of step 3, 2 ranks\n" in said and ": 2 nodes x 1 rank\n" in said
    assert "\nsteps 4 to 5: the same (metrics and 1 digest)\n" in said, said
    (again,) = user.root.glob("done-again-replay-4-*")
    assert f"TRACKIO_DIR: {again}/probes" in (again / "config.yaml").read_text(), "its script's trackers are silent"
    (attempt,) = user.attempts(again.name)
    assert (attempt["reason"], attempt["end_step"], attempt["requeue"]) == ("cancelled", 5, False)
    assert (again / "code").resolve() == user.run("done-again").code.resolve(), "the code of that time"
    assert len(user.attempts("done-again")) == 1 and user.verify("done-again")[-1]["step"] == 6
