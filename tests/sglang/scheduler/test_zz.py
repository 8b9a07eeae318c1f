import pytest
from test_scheduler_states import *
from test_scheduler_states import told, edited, windowed, LIVE
import leyline_engine.sglang.splicer as sp
import leyline_engine.admit.content_reuse as cr
def test_a(monkeypatch):
    sch=windowed(); req=told(sch)
    o=sp.Splicer.begin
    def begin(self,turn,*a):
        o(self,turn,*a); print('PLAN',turn.plan, 'cursor',turn.staging.cursor)
    monkeypatch.setattr(sp.Splicer,'begin',begin)
    o2=sp.Splicer.row_computed
    def rc(self,row):
        o2(self,row); print('ROW',row.end,row.prefix_len,row.extend_end,'cursor', row.leyline.staging and (row.leyline.staging.cursor, len(self._cache.path_device_indices(row.leyline.staging.lock.node)), len(self._cache.path_device_indices(row.last_node))), row.kv.cache_protected_len)
    monkeypatch.setattr(sp.Splicer,'row_computed',rc)
    o3=sp.Splicer._copy_piece
    def cp(self,turn,run,staging,anchor):
        print('COPY',run,staging.cursor,len(self._cache.path_device_indices(staging.lock.node)))
        return o3(self,turn,run,staging,anchor)
    monkeypatch.setattr(sp.Splicer,'_copy_piece',cp)
    edited(sch, req, Directive(60, 90, tuple(text(7, 4))))
def test_b(monkeypatch):
    scheduler, document = windowed(), text(150, 9)
    scheduler.serve([*text(40, 5), *document], EditPayload(session="a", scope="t", turn="t1"))
    print('INDEX', len(scheduler.engine._reuse.index))
    o=sp.Splicer.begin
    def begin(self,turn,checked,*a):
        o(self,turn,checked,*a); print('PLAN',turn.plan, checked.edit.copies)
    monkeypatch.setattr(sp.Splicer,'begin',begin)
    n=scheduler.cache.find(scheduler.engine.registry.turns(("t","a"))[0].keys(), Space())
    print('ANCH', scheduler.cache.state.anchors(n.last_device_node), n.device_prefix_len)
    other = EditPayload(session="b", scope="t", turn="t1")
    _, record = scheduler.serve([*text(50, 6), *document, 1], other, reuse=LIVE)
    print(record)
