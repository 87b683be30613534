from typing_extensions import disjoint_base

@disjoint_base
class Call: ...

@disjoint_base
class DispatchCall(Call): ...

@disjoint_base
class CombineCall(Call): ...
