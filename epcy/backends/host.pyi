from epcy.backends.call import CombineCall, DispatchCall
from epcy.backends.host_epoch import HostEpoch
from epcy.handle import Combine, Dispatch

class HostBackend(HostEpoch):
    def dispatch(self, call: DispatchCall) -> Dispatch: ...
    def combine(self, call: CombineCall) -> Combine: ...
