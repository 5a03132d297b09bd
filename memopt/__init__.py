"""Trains an ordinary PyTorch model under a budget in bytes, at the smallest slowdown and with the same numbers.

Workload --profile--> Profile --plan(budget)--> Plan --apply--> Session --report--> forecast vs measured
"""

from memopt import errors
from memopt.api import plan, profile
from memopt.apply import apply
from memopt.policies.plan import Forecast, Plan
from memopt.profiler.profile import Profile
from memopt.quant.optimizer import expanded
from memopt.session import Session
from memopt.workload import Workload
from memopt.wrap import session_of, wrap_model, wrap_optimizer

__version__ = "0.1.0"

__all__ = [
    "Forecast",
    "Plan",
    "Profile",
    "Session",
    "Workload",
    "apply",
    "errors",
    "expanded",
    "plan",
    "profile",
    "session_of",
    "wrap_model",
    "wrap_optimizer",
]
