-- Commits a step: stores state, response and number together, if the worker still owns the sequence. The last step of a life
-- ends it. The response to the step before is kept until that one is answered.
-- KEYS: record, state, state as it was staged, response, response as it was staged.
-- ARGV: partition's prefix, whether Redis may lose, name, token, life, number, entry id, state's place (none = it stays |
--   given | staged), state, response's place, response.
-- Returns {done | known (it was committed before) | lost (another one owns it) | gone (what was staged), names of objects that
--   nothing refers to now}.
local function one(KEYS, ARGV)
begin(ARGV[1], ARGV[2])
local name, token, life, n, entry = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local state, staged_state, answer, staged_answer = unpack(KEYS, 2)
local gone = {}

local function refuse(what)
  for _, staged in ipairs({staged_state, staged_answer}) do
    if redis.call('EXISTS', staged) == 1 then drop(staged, gone) end
  end
  return {what, gone}
end

local of = load(name)
local is_owner = of and of.token == token
if is_owner and redis.call('EXISTS', answer) == 1 and (of.life > life or of.committed >= n) then return refuse('known') end
if not is_owner or of.state ~= 'open' or of.owner == '' or of.life ~= life or n ~= of.committed + 1 then
  return refuse('lost')
end
for i, place in pairs({[staged_state] = ARGV[8], [staged_answer] = ARGV[10]}) do
  if place == 'staged' and redis.call('EXISTS', i) == 0 then return refuse('gone') end
end

redis.call('ZREM', prefix .. 'sequence-owners', '') -- changes nothing, but is a write: after one, full memory stops no script
keep(name, of.idle + DAY_MS)
local lifetime = redis.call('PTTL', KEYS[1])
local function put(key, staged, place, value)
  if place == 'none' then return end
  if redis.call('EXISTS', key) == 1 then drop(key, gone) end
  if place == 'staged' then
    redis.call('RENAME', staged, key)
    redis.call('PEXPIRE', key, lifetime)
  else
    redis.call('SET', key, value, 'PX', lifetime)
  end
end
put(state, staged_state, ARGV[8], ARGV[9])
put(answer, staged_answer, ARGV[10], ARGV[11])
if of.entry ~= '' and #redis.call('XRANGE', steps_of(name), of.entry, of.entry) == 0 then
  drop(answer_of(name, life, n - 1), gone)
end
write(of, {committed = n, entry = entry, deaths = 0, used = now_ms()})
if tonumber(redis.call('HGET', KEYS[1], 'last:' .. life) or 0) == n then
  for _, object in ipairs(over(of, GRACE_MS)) do gone[#gone + 1] = object end
end
return {'done', gone}
end
