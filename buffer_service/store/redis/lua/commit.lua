-- step, checkpointed, steps to remember, n, n times (step of a batch, number of its groups, their ids); frame keys
run_even_when_full()
local step, checkpointed, remembered = count(), count(), count()
call('HSET', K.meta, 'committed', math.max(step, meta('committed')))
checkpointed = math.max(checkpointed, meta('checkpointed'))
call('HSET', K.meta, 'checkpointed', checkpointed)
for _ = 1, count() do
  -- Skip a batch that another call has released meanwhile, with its groups.
  local is_mine = call('HDEL', K.batches, arg()) == 1
  local ids = list()
  local frames = frame_keys(#ids)
  if is_mine then refer(ids, -1, frames) end
end
local forgotten = checkpointed - remembered
call('ZREMRANGEBYSCORE', K.done, '-inf', '(' .. forgotten)
-- The newest round up to the checkpoint stays: a scheduler that starts again asks for it again.
local rounds, newest = call('HKEYS', K.rounds), 0
for _, round in ipairs(rounds) do
  if tonumber(round) <= checkpointed then newest = math.max(newest, tonumber(round)) end
end
for _, round in ipairs(rounds) do
  if tonumber(round) < newest then call('HDEL', K.rounds, round) end
end
return 1
