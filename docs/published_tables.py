"""The authors' published results as the two tables that `rewound` reads.

    git clone https://github.com/lottery-ticket/rewinding-iclr20-public
    pip install pandas
    python docs/published_tables.py rewinding-iclr20-public

writes published-pruned.csv.gz (22,590 pruned networks) and published-dense.csv.gz (1,180 dense ones) into the current
folder. The authors keep them as pickles of pandas, and reading a pickle runs whatever code is in it: give only what you
have cloned from their repository.
"""

import argparse
from pathlib import Path

import pandas

RECIPES = {
    "resnet20": "cifar10-resnet20",
    "resnet56": "cifar10-resnet56",
    "resnet110": "cifar10-resnet110",
    "vgg16_nofc": "cifar10-vgg16",
    "resnet34": "imagenet-resnet34",
    "resnet50": "imagenet-resnet50",
    "gnmt": "wmt16-gnmt",
}
TECHNIQUES = {
    "finetune": "fine-tuning",
    "lottery": "weight-rewinding",
    "lr_finetune": "lr-rewinding",
    "lr_lottery": "low-lr-weight-rewinding",
    "reinit": "reinitialization",
}


def pruned(table: pandas.DataFrame) -> pandas.DataFrame:
    """The authors' table of pruned networks, in the first ten columns of results.csv."""
    return pandas.DataFrame(
        {
            "recipe": table["network"].map(RECIPES),
            "pruning": table["prune_method"].str.lower(),
            "iterative": table["is_iterative"].astype(int),
            "technique": table["retrain_method"].map(TECHNIQUES),
            "density": table["density"],
            "retrain_epochs": table["retrain_time"],
            "trial": table["trial"].str.removeprefix("trial_").astype(int),
            "val": table["val_acc"],
            "test": table["test_acc"],
            "flops": table["flops"],
        }
    )


def dense(table: pandas.DataFrame) -> pandas.DataFrame:
    """The authors' table of dense networks."""
    columns = {"test_acc": "test", "val_acc": "val", "flops": "flops"}
    return pandas.concat(
        [table["network"].map(RECIPES).rename("recipe"), table[[*columns]].rename(columns=columns)], axis=1
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a clone of the authors' repository")
    plots = parser.parse_args().folder / "vision" / "plot"
    if not plots.is_dir():
        parser.error(f"there is no folder {plots}; give a clone of the authors' repository")
    tables = {
        "published-pruned.csv.gz": pruned(pandas.read_pickle(plots / "pruned_dataframe.pkl")),
        "published-dense.csv.gz": dense(pandas.read_pickle(plots / "bases_dataframe.pkl")),
    }
    for name, table in tables.items():
        table.round(6).to_csv(name, index=False)  # 0.1342 is stored as 0.13419999999999999


if __name__ == "__main__":
    main()
