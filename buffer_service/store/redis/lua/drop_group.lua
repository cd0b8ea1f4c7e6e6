-- group id, "label id" if it were an evaluation's; its frame key -> the table that it was in, or ''
run_even_when_full()
local id, member, frame = arg(), arg(), frame_key()
local table = ''
if call('ZREM', K.fresh, id) == 1 then
  table = 'fresh'
  call('HDEL', K.requests, id)
  call('HINCRBY', K.meta, 'fresh_bytes', 0 - call('STRLEN', frame))
  -- One group less fills the steps: the scheduler asks for another.
  call('HINCRBY', K.meta, 'fresh_dropped', 1)
elseif call('ZREM', K.reevaluated, id) == 1 then
  table = 'reevaluated'
elseif call('ZSCORE', K.evaluated, member) and call('HEXISTS', K.refs, id) == 1 then
  -- It stays settled without a group, as a request that failed for good.
  table = 'evaluated'
else
  return ''
end
refer({id}, -1, {frame})
call('HINCRBY', K.counters, 'dropped_groups:by_hand', 1)
return table
