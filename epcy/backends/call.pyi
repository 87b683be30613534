from typing_extensions import disjoint_base

@disjoint_base
class DispatchCall: ...

@disjoint_base
class CombineCall: ...
