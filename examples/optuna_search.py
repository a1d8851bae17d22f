"""Search the hidden size and the learning rate of a network with Optuna.

The data are those of ``cross_validation.py``. They are written once, for all trials. The model and
the optimizer are functions of a trial's values. Each trial trains for some epochs and reports its
validation loss. If other trials were better by then, Optuna prunes it. Otherwise ``fit`` resumes
the trial's run for more epochs.

Run it with ``python examples/optuna_search.py``; see ``--help`` for options.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import make_parser, start_spark
from cross_validation import LABEL, make_network, split_tumours
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from hvd_estimators import prepare_data
from hvd_estimators.torch import TorchEstimator, TorchModel


def search(train: DataFrame, args: argparse.Namespace) -> tuple[Any, TorchModel]:
    """Return Optuna's study and the model of its best trial."""
    import optuna

    estimator = TorchEstimator(
        num_proc=args.num_proc,
        store=args.output / "store",
        model=make_network,
        model_args={"width": 8},
        optimizer=torch.optim.Adam,
        loss=nn.functional.binary_cross_entropy_with_logits,
        labelCol=LABEL,
        rawPredictionCol="rawPrediction",
        batch_size=args.batch_size,
        random_seed=args.seed,
        verbose=0,
    )
    rounds = [args.epochs // 4, args.epochs // 2, args.epochs]
    models = {}

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", 2, 64, log=True)
        rate = trial.suggest_float(
            "learning_rate", args.learning_rate / 10, args.learning_rate * 100, log=True
        )
        candidate = estimator.copy(
            {
                "model_args": {"width": width},
                "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=rate),
                "run_id": f"{study.study_name}-{trial.number}",
            }
        )
        for epochs in rounds:
            # Each fit after the first one resumes the run of this trial.
            model = candidate.copy({"epochs": epochs}).fit_on_parquet(dataset_idx=dataset)
            loss = model.summary.values("loss", "validation")[-1]
            trial.report(loss, epochs)
            if epochs < args.epochs and trial.should_prune():
                raise optuna.TrialPruned
        models[trial.number] = model
        return loss

    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=args.seed),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=rounds[0], reduction_factor=2),
    )
    with prepare_data(
        args.num_proc, args.output / "store", train, [LABEL], ["features"], validation=0.25
    ) as dataset:
        study.optimize(objective, n_trials=args.trials)
    return study, models[study.best_trial.number]


def print_trials(study: Any) -> None:
    """Print the values, the epochs and the last validation loss of each trial."""
    print(f"\n{'width':>5}{'learning rate':>15}{'epochs':>8}   validation loss")
    for trial in study.trials:
        epochs, loss = max(trial.intermediate_values.items())
        width, rate = trial.params["width"], trial.params["learning_rate"]
        print(f"{width:>5}{rate:>15.5f}{epochs:>8}   {loss:.4f}  {trial.state.name.lower()}")


def run(spark: SparkSession, args: argparse.Namespace) -> tuple[Any, float]:
    """Search; return the study and the best model's score on the test rows."""
    train, held_out = split_tumours(spark, args.seed)
    study, model = search(train, args)
    print_trials(study)
    predictions = model.transform(held_out)
    score = BinaryClassificationEvaluator(labelCol=LABEL).evaluate(predictions)
    print(f"\nArea under ROC on rows held out, of the best network: {score:.4f}")
    return study, score


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = make_parser(__doc__, "optuna_search", epochs=16)
    parser.add_argument("--trials", type=int, default=10, help="networks to try")
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = parse_args()
    with start_spark(arguments, "optuna_search") as session:
        run(session, arguments)
