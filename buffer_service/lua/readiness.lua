-- step -> {assembled, fresh groups, requests left of the step's round ('' when not issued), failures, last failure}
return {
  meta('assembled'),
  call('ZCARD', K.fresh),
  call('HGET', K.rounds, arg()) or '',
  meta('failures_in_a_row'),
  call('HGET', K.meta, 'last_failure') or '',
}
