-- Commits a step: stores state, response and number together, if the worker still owns the sequence. The last step of a life
-- ends it. The response to the step before is kept until that one is answered.
-- KEYS: record, state, state as it was staged, response, response as it was staged.
-- ARGV: partition's prefix, whether Redis may lose, name, token, life, number, state's place (none = it stays | given |
--   staged), state, response's place, response.
-- Returns {done | known (it was committed before) | lost (another one owns it) | gone (what was staged), names of objects that
--   nothing refers to now}.
local function one(KEYS, ARGV)
begin(ARGV[1], ARGV[2])
make_room()
local name, token, life, n = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local state, staged_state, answer, staged_answer = unpack(KEYS, 2)
local gone = {}

local function refuse(what)
  if ARGV[7] == 'staged' then drop(staged_state, gone) end
  if ARGV[9] == 'staged' then drop(staged_answer, gone) end
  return {what, gone}
end

local function is_there(staged, place) return place ~= 'staged' or redis.call('EXISTS', staged) == 1 end

local of = load(name)
local is_owner = of and of.token == token
if is_owner and (of.life > life or of.committed >= n) and redis.call('EXISTS', answer) == 1 then return refuse('known') end
if not is_owner or of.state ~= 'open' or of.owner == '' or of.life ~= life or n ~= of.committed + 1 then
  return refuse('lost')
end
if not (is_there(staged_state, ARGV[7]) and is_there(staged_answer, ARGV[9])) then return refuse('gone') end

local lifetime = keep(name, of.idle + DAY_MS)
local function put(key, staged, place, value)
  if place == 'none' then return end
  if redis.call('TYPE', key).ok == 'hash' then drop(key, gone) end
  if place == 'staged' then
    redis.call('RENAME', staged, key)
    redis.call('PEXPIRE', key, lifetime)
  else
    redis.call('SET', key, value, 'PX', lifetime)
  end
end
-- Tells whether a step before this one is removed; mostly this one is the only one.
local function is_removed(step)
  if redis.call('XLEN', steps_of(name)) == 1 then return true end
  local is_there = false
  each_step(name, function(_, fields)
    is_there = is_there or (tonumber(fields.l) == life and tonumber(fields.n) == step)
    return not is_there and tonumber(fields.l) <= life
  end)
  return not is_there
end
put(state, staged_state, ARGV[7], ARGV[8])
put(answer, staged_answer, ARGV[9], ARGV[10])
if n > 1 and is_removed(n - 1) then drop(answer_of(name, life, n - 1), gone) end
write(of, {committed = n, deaths = 0, used = now_ms()}, life .. ' ' .. n)
if tonumber(redis.call('HGET', KEYS[1], 'last:' .. life) or 0) == n then
  for _, object in ipairs(over(of, GRACE_MS)) do gone[#gone + 1] = object end
end
return {'done', gone}
end
