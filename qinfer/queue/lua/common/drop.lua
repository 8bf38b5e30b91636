-- Removes a value; where it refers to an object in a store, that object's name is added to `gone`, for the caller to delete.
local function drop(key, gone)
  if redis.call('TYPE', key).ok == 'hash' then gone[#gone + 1] = redis.call('HGET', key, 'name') end
  redis.call('UNLINK', key)
end
