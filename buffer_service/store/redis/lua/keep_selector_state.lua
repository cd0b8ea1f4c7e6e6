-- round, step up to which success counts are in the state, the state -> 1, or 0 if its round is not newer
run_even_when_full()
local round, through = count(), count()
if round <= meta('selector_round') then return 0 end
call('SET', K.selector, arg())
call('HSET', K.meta, 'selector_round', round, 'selector_through', through)
for _, step in ipairs(call('HKEYS', K.success_counts)) do
  if tonumber(step) <= through then call('HDEL', K.success_counts, step) end
end
return 1
