"""Proposals of a sampler, with as many digits as people read."""

from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler

from kfp_ddp.plan.sweep import rounded


class RoundingSampler(BaseSampler):
    """Rounds what another sampler proposes, so that Optuna knows the values that are trained."""

    def __init__(self, inner: BaseSampler) -> None:
        self._inner = inner

    def infer_relative_search_space(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return that no settings are proposed together."""
        return {}

    def sample_relative(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return no settings; see `infer_relative_search_space`."""
        return {}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return the proposal for one setting."""
        value = self._inner.sample_independent(study, trial, param_name, param_distribution)
        if isinstance(param_distribution, FloatDistribution):
            return rounded(value, param_distribution.low, param_distribution.high)
        return value
