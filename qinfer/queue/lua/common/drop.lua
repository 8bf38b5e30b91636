-- Removes a value; adds the name of its object to `gone`, for the caller to delete.
local function drop(key, gone)
  if redis.call('TYPE', key).ok == 'hash' then gone[#gone + 1] = redis.call('HGET', key, 'name') end
  redis.call('UNLINK', key)
end
