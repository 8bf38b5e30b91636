-- Counts what an operation has changed, in the step that changes it; an operation that has expired counts nothing.
local function count_changed(operation, changed)
  if operation and changed > 0 and redis.call('EXISTS', operation) == 1 then
    redis.call('HINCRBY', operation, 'changed', changed)
  end
end
