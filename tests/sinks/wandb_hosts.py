"""Trains once per way in which a script may log to W&B; prints where each run went.

python wandb_hosts.py ROOT HOST...
"""

import json
import sys

import wandb
from conftest import make_faulty_run

from sdcwatch.sinks import wandb as sink_module
from sdcwatch.sinks.dispatch import Dispatcher

ROWS = {
    "third": lambda run, n, row: run.log(row) if n % 3 == 0 else None,
    "step": lambda run, n, row: run.log(row, step=n),
    "commit": lambda run, n, row: run.log(row, commit=True),
    "axis": lambda run, n, row: run.log({**row, "my/step": 10 * n}),
    "never": lambda run, n, row: None,
}


def train(host, root):
    settings = wandb.Settings(
        x_disable_stats=True, x_disable_meta=True, console="off", save_code=False, silent=True,
        disable_git=True,
    )  # fmt: skip
    run = wandb.init(project="p", name=host, dir=f"{root}/{host}", settings=settings)
    if host == "axis":
        run.define_metric("my/step")
        run.define_metric("*", step_metric="my/step")
    links = {"dashboard": "https://g/d/run"}
    dispatcher = Dispatcher([sink_module.WandbSink(run, links=links)], close_seconds=30.0)
    for n, record in enumerate(make_faulty_run(), start=1):
        dispatcher.emit(record)
        assert dispatcher.drain(30.0)
        ROWS[host](run, n, {"loss": 1.0 / n, "my/n": n})
    dispatcher.close()
    (counts,) = dispatcher.counts
    where = {"dir": run.dir, "lost": counts.lost, "id": run.id, "entity": run.entity}
    run.finish()
    return where


if __name__ == "__main__":
    sink_module.TABLE_SECONDS = 0.0  # each event an increment of its own: the hardest case
    print(json.dumps({host: train(host, sys.argv[1]) for host in sys.argv[2:]}))
