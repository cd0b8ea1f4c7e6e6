-- worker -> number of leases that returned
run_even_when_full()
local worker, released = arg(), 0
local holders = call('HGETALL', K.holders)
for i = 1, #holders, 2 do
  if holders[i + 1] == worker then
    requeue(find_open(holders[i]))
    released = released + 1
  end
end
call('ZREM', K.heard, worker)
call('HDEL', K.claims, worker)
return released
