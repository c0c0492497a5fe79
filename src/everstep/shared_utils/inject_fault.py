"""Handed on: faults on purpose live in `everstep.inprocess.tools.inject_fault`."""

from everstep.inprocess.tools.inject_fault import Fault as Fault
from everstep.inprocess.tools.inject_fault import InjectedException as InjectedException
from everstep.inprocess.tools.inject_fault import clear_workload_exception as clear_workload_exception
from everstep.inprocess.tools.inject_fault import dispatch_fault_injection as dispatch_fault_injection
from everstep.inprocess.tools.inject_fault import inject_fault as inject_fault
from everstep.inprocess.tools.inject_fault import maybe_raise_workload_exception as maybe_raise_workload_exception
from everstep.inprocess.tools.inject_fault import register_fault as register_fault
