from typing_extensions import disjoint_base

from epcy.checks import Checker

@disjoint_base
class LowLatencyChecker(Checker): ...
