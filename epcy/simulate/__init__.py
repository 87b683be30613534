"""What dispatch and combine should take on machines that are not at hand: `python -m epcy simulate`.

Traffic of a drawn or recorded routing (traffic.py) becomes pieces of work with an order (paths.py), which a
discrete-event simulation (engine.py) takes through the SMs, NVLink ports and NICs of all ranks. Constants of machines
are in machines.py; what a Buffer takes of memory and queue pairs as ranks grow is in footprint.py.
"""

from __future__ import annotations

from epcy.simulate.footprint import Footprint, footprints
from epcy.simulate.machines import MACHINES, Machine
from epcy.simulate.predict import Prediction, Workload, simulate

__all__ = ["MACHINES", "Footprint", "Machine", "Prediction", "Workload", "footprints", "simulate"]
