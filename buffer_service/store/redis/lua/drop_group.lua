-- group id, "label id" if it were an evaluation's; its frame key -> its table, or ''
run_even_when_full()
local id, member, frame = arg(), arg(), frame_key()
local table = ''
if call('ZREM', K.fresh, id) == 1 then
  table = 'fresh'
  call('HDEL', K.requests, id)
  call('HINCRBY', K.meta, 'fresh_bytes', 0 - call('STRLEN', frame))
  -- The steps are short of one group: the scheduler requests another.
  call('HINCRBY', K.meta, 'fresh_dropped', 1)
elseif call('ZREM', K.reevaluated, id) == 1 then
  table = 'reevaluated'
elseif call('ZSCORE', K.evaluated, member) and call('HEXISTS', K.refs, id) == 1 then
  -- It remains finished without a group, like a request that failed permanently.
  table = 'evaluated'
else
  return ''
end
refer({id}, -1, {frame})
call('HINCRBY', K.counters, 'dropped_groups:by_hand', 1)
return table
