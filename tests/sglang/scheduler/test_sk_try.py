import sys
import pytest
from state_scheduler import *
from test_scheduler_random import Driver
from leyline_engine.contract import RecurrentEdits
pytestmark = pytest.mark.usefixtures("server_args")
@pytest.mark.parametrize("kind,options",[(RecurrentScheduler,{}),(RecurrentScheduler,{"buffered":True}),(RecurrentScheduler,{"buffered":True,"overlap":True}),(WindowScheduler,{}),(WindowScheduler,{"page":16})])
def test_x(kind, options):
    s=kind(**options)
    d=Driver(0,s)
    d.run(300)
    print(kind, d.spliced,d.reused,d.forgot, getattr(s,"started",None))
