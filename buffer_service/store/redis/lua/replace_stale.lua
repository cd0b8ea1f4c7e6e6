-- whether to hold the groups, n, n times (group id, event, result, request); one frame key per group
-- -> ids of the groups that remain, because the id of their replacement is in use
-- The first of them is queued last, so that it comes first at the head.
run_even_when_full()
local hold, taken, gone, frames = count() == 1, {}, {}, {}
for _ = 1, count() do
  local id, event, result, request, frame = arg(), arg(), arg(), request_args(), frame_key()
  local is_there = call('ZSCORE', K.fresh, id)
  if is_there and enqueue(request, true) == 0 then
    taken[#taken + 1] = id
  elseif is_there then
    call('ZREM', K.fresh, id)
    call('HDEL', K.requests, id)
    call('HINCRBY', K.meta, 'fresh_bytes', 0 - call('STRLEN', frame))
    if not hold then
      gone[#gone + 1] = id
      frames[#gone] = frame
    end
    call('LPUSH', K.stale, result)
    call('HINCRBY', K.counters, event, 1)
  end
end
refer(gone, -1, frames)
return taken
