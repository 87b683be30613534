from epcy.backends.call import CombineCall, DispatchCall
from epcy.backends.nvshmem_epoch import NvshmemEpoch
from epcy.handle import Combine, Dispatch

class NvshmemBackend(NvshmemEpoch):
    def dispatch(self, call: DispatchCall) -> Dispatch: ...
    def combine(self, call: CombineCall) -> Combine: ...
