-- worker, n, n request ids -> those still leased to the worker
run_even_when_full()
local worker, held = arg(), {}
hear(worker)
for _ = 1, count() do
  local id = arg()
  if call('HGET', K.holders, id) == worker then
    call('ZADD', K['leases_' .. find_open(id).purpose], now_ms() + LEASE_MS, id)
    held[#held + 1] = id
  end
end
return held
