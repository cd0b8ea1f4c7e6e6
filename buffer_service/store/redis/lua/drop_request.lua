-- request id -> 1 when it was open, queued or leased
run_even_when_full()
local request = find_open(arg())
if not request then return 0 end
drop_open(request, 'by_hand')
return 1
