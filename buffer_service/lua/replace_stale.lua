-- whether to hold the groups, n, n times (group id, event, fate, request); one frame key per group
-- -> how many were dropped
-- The first of them is queued last, so that it comes first at the head.
run_even_when_full()
local hold, dropped = count() == 1, 0
for _ = 1, count() do
  local id, event, fate, request, frame = arg(), arg(), arg(), request_args(), frame_key()
  if call('ZREM', K.fresh, id) == 1 then
    call('HDEL', K.requests, id)
    call('HINCRBY', K.meta, 'fresh_bytes', 0 - call('STRLEN', frame))
    if not hold then refer(id, -1, frame) end
    enqueue(request, true)
    call('LPUSH', K.stale, fate)
    call('HINCRBY', K.counters, event, 1)
    dropped = dropped + 1
  end
end
apply_references()
return dropped
